"""The HTTP client of Mell's API: OpenAI completions as streams of events, and the operator's `/mell` calls.

The command line, the replay, the benchmarks and the integration tests import it; it imports httpx, and from the rest of
the project only the records of migrations and the names of states. Requests go out once and are never repeated; JSON
documents and events come back, or a `ClientError` with the server's own message.
"""
