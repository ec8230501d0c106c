"""What the load generator reads out of an answer."""

from benchmarks.load import TimedStream


def test_cached_tokens_are_in_the_usage() -> None:
    usage = b'"usage":{"prompt_tokens":40,"prompt_tokens_details":%s}'
    for details, cached in ((b'{"cached_tokens":32}', 32), (b"null", 0)):
        text = b'HTTP/1.1 200 OK\r\n\r\ndata: {"usage":null}\n\ndata: {' + usage % details + b"}\n\ndata: [DONE]\n\n"
        assert TimedStream(text=text).cached_tokens == cached
