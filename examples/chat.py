"""A chat that is streamed while its request may move from one GPU to another: nothing of that shows.

python examples/chat.py "Why is the sky blue?"
"""

import argparse

from openai import OpenAI


def main() -> None:
    """Print the answer as it comes."""
    parser = argparse.ArgumentParser(description="Ask the first model of a server that speaks OpenAI's protocol.")
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="needed only if the server has keys")
    parser.add_argument("--tokens", type=int, default=200, help="the longest answer, in tokens (default: %(default)s)")
    given = parser.parse_args()
    with OpenAI(base_url=f"{given.url}/v1", api_key=given.api_key) as client:
        model = client.models.list().data[0].id
        with client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": given.question}],
            max_tokens=given.tokens,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    print(choice.delta.content or "", end="", flush=True)
                if chunk.usage is not None:
                    print(f"\n[{model}: {chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
