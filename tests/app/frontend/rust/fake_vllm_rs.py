"""A program in the place of `vllm-rs`: its options, its sockets, HTTP, and vLLM's wire, with token ids as text.

A prompt is a list of token ids. Of the arguments, `nonsense` is refused. The prompt [0] kills the program.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from migration.protocol.core_messages import CoreOutput, CoreRequest, encode_request

ADD, ABORT, FINISH_ERROR = b"\x00", b"\x01", 3
"""Of vLLM's EngineCoreRequestType and FinishReason. To import vLLM would take seconds."""

METRICS = """# HELP vllm:request_success Requests.
# TYPE vllm:request_success counter
vllm:request_success_total{model_name="m",finished_reason="length"} 3
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 1
# EOF
"""


class FakeOutput(CoreOutput, array_like=True):
    """With the member that ends a request."""

    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None


class FakeFrontend:
    def __init__(self, inputs: int, outputs: int) -> None:
        context = zmq.asyncio.Context()
        self._inputs = _adopt(context.socket(zmq.ROUTER), inputs)
        self._outputs = _adopt(context.socket(zmq.PULL), outputs)
        self._queues: dict[str, asyncio.Queue[FakeOutput]] = {}
        self._core = b""

    async def start(self) -> None:
        self._core, _ready = await self._inputs.recv_multipart()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
        while True:
            _, outputs, *_ = decoder.decode(await self._outputs.recv())
            for output in msgspec.msgpack.decode(outputs, type=list[FakeOutput]):
                if queue := self._queues.get(output.request_id):
                    queue.put_nowait(output)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        answering = asyncio.create_task(self._answer(head[0].split()[1], headers, body, writer))
        leaving = asyncio.create_task(reader.read())
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait({answering, leaving})
        writer.close()

    async def _answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        match path:
            case "/health":
                _write(writer, 200, b"", "text/plain")
            case "/metrics":
                _write(writer, 200, METRICS.encode(), "text/plain")
            case "/v1/models":
                _write(writer, 200, b'{"object":"list"}')
            case "/v1/completions":
                await self._complete(f"cmpl-{headers['x-request-id']}", json.loads(body), writer)
            case _:
                _write(writer, 404, b"", "text/plain")
        await writer.drain()

    async def _complete(self, name: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["prompt"] == [0]:
            os._exit(3)
        if body.get("n", 1) > 1:
            return _write(writer, 400, b'{"error":{"message":"Only n=1 is supported.","param":"n"}}')
        sampling = {"max_tokens": body["max_tokens"], "extra_args": body.get("vllm_xargs")}
        sampling |= {"structured_outputs": body["structured_outputs"]} if "structured_outputs" in body else {}
        request = CoreRequest(f"{name}-1", body["prompt"], sampling_params=sampling, external_req_id=name)
        queue = self._queues[request.request_id] = asyncio.Queue[FakeOutput]()
        await self._send(ADD, *encode_request(request))
        try:
            await self._write_outputs(queue, name, bool(body.get("stream")), writer)
        except BaseException:
            await self._send(ABORT, msgspec.msgpack.encode([request.request_id]))
            raise

    async def _write_outputs(
        self, queue: "asyncio.Queue[FakeOutput]", name: str, stream: bool, writer: asyncio.StreamWriter
    ) -> None:
        if stream:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        text, finish = "", None
        while finish is None:
            output = await queue.get()
            part = "".join(f"{token} " for token in output.new_token_ids)
            text, finish = text + part, output.finish_reason
            if stream:
                _chunk(writer, {"id": name, "choices": [{"text": part}]})
                await writer.drain()
        failed = finish == FINISH_ERROR
        if stream:
            if failed:
                _chunk(writer, {"error": {"message": "Internal server error", "code": "server_error"}})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            answer: Any = {"error": {}} if failed else {"id": name, "choices": [{"text": text}]}
            _write(writer, 500 if failed else 200, json.dumps(answer).encode())

    async def _send(self, kind: bytes, *frames: bytes) -> None:
        await self._inputs.send_multipart([self._core, kind, *frames])


def _write(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def _chunk(writer: asyncio.StreamWriter, data: Any) -> None:
    event = f"data: {json.dumps(data)}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def _adopt(adopting: zmq.asyncio.Socket, number: int) -> zmq.asyncio.Socket:
    with socket.socket(fileno=os.dup(number)) as listening:
        name = listening.getsockname()
    adopting.setsockopt(zmq.USE_FD, number)
    adopting.bind(f"ipc://{name}")
    return adopting


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["frontend"])
    for name in ("listen", "input-listener", "output-listener"):
        parser.add_argument(f"--{name}-fd", type=int, required=True)
    parser.add_argument("--args-json", type=json.loads, required=True)
    options = parser.parse_args()
    if "nonsense" in options.args_json:
        sys.exit("error: nonsense is not implemented")
    print(f"(RustFrontend pid={os.getpid()}) WARNING 11-23 06:38:54 [fake.py:1] it starts", file=sys.stderr, flush=True)
    frontend = FakeFrontend(options.input_listener_fd, options.output_listener_fd)
    await frontend.start()
    server = await asyncio.start_unix_server(frontend.serve, sock=socket.socket(fileno=options.listen_fd))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
