"""Writes the generated pages: `python -m docs.make`."""

from docs.make import api, compatibility, dashboard, flags, gpu, results, settings

if __name__ == "__main__":
    for generator in (api, compatibility, dashboard, flags, gpu, results, settings):
        generator.PAGE.write_text(generator.page())
