"""Made-up sessions, and the order of requests in sessions."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from policies.model import RequestId, Tokens
from policies.prefix.names import digests, name_of
from simulator.errors import BadInput
from simulator.workload.sessions import SHAPES, SessionShape, Texts, sessions
from simulator.workload.workload import Job, Poisson, Recipe, Succession, draw, read_trace

BLOCK = 16


def drawn(shape: SessionShape, seed: int = 0, block_tokens: int = BLOCK) -> tuple[Job, ...]:
    return draw(Recipe(Poisson(1.0, shape), None, 30.0, Tokens(10_000), block_tokens=block_tokens), seed).jobs


def by_session(jobs: tuple[Job, ...]) -> list[list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.session, []).append(job)
    return list(found.values())


def common(one: Job, other: Job) -> int:
    """The number of first blocks that two prompts share."""
    pairs = zip(one.names, other.names, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.names), len(other.names)))


@pytest.mark.parametrize("kind", SHAPES)
def test_equal_seeds_give_equal_sessions(kind: str) -> None:
    assert drawn(SHAPES[kind]) == drawn(SHAPES[kind]) != drawn(SHAPES[kind], 1)


@pytest.mark.parametrize("kind", SHAPES)
def test_requests_of_a_session_follow_each_other(kind: str) -> None:
    for turns in by_session(drawn(SHAPES[kind])):
        assert [job.after for job in turns] == [None, *(job.id for job in turns[:-1])]
        assert turns[0].think_s == 0 and all(job.think_s > 0 for job in turns[1:])
        assert len({job.arrival_s for job in turns}) == 1
        assert all(job.prompt + job.output <= SHAPES[kind].longest for job in turns)


def test_a_prompt_of_a_conversation_begins_with_the_one_before_and_its_answer() -> None:
    conversations = by_session(drawn(SHAPES["sharegpt_like"]))
    assert max(map(len, conversations)) >= 4
    for turns in conversations:
        for job, following in pairwise(turns):
            assert following.prompt > job.prompt + job.output
            assert following.names[: len(job.context)] == job.context
    first, second = conversations[:2]
    assert not common(first[0], second[0])


def test_questions_share_their_document_alone() -> None:
    documents = by_session(drawn(SHAPES["loogle_like"]))
    assert all(len(turns) == 5 for turns in documents)
    for turns in documents:
        assert {common(turns[0], job) for job in turns[1:]} == {1000 // BLOCK}
        assert all(name < 0 for job in turns for name in job.outputs[1:]), "nobody finds the answers"
    assert not common(documents[0][0], documents[1][0])


def test_questions_at_once_come_by_the_clock() -> None:
    jobs = drawn(SHAPES["loogle_at_once"])
    assert all(job.after is None and not job.think_s for job in jobs)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    documents: dict[int, list[Job]] = {}
    for job in jobs:
        documents.setdefault(job.names[1000 // BLOCK - 1], []).append(job)
    assert {len(questions) for questions in documents.values()} == {5}
    apart = [after.arrival_s - job.arrival_s for questions in documents.values() for job, after in pairwise(questions)]
    assert 0.1 < sum(apart) / len(apart) < 0.4
    neighbours = (common(job, after) for job, after in pairwise(jobs))
    assert 0 in neighbours, "questions about several documents come between each other"


def test_agents_share_their_instructions() -> None:
    agents = by_session(drawn(SHAPES["react_like"]))
    assert {common(agents[0][0], turns[0]) for turns in agents[1:]} == {1500 // BLOCK}


def test_the_names_are_those_of_the_texts_tokens() -> None:
    (request, *_) = sessions(SHAPES["loogle_like"], [1.0], 7)
    tokens = Texts(7).tokens(request.prompt)
    assert len(tokens) == request.prompt_tokens and set(tokens) <= set(range(3, 500))
    job = drawn(SHAPES["loogle_like"], 7)[0]
    assert job.names == tuple(map(name_of, digests(tokens, BLOCK)))
    known = Texts(7, {request.prompt[0].text: [5] * 1000})
    assert known.tokens(request.prompt)[:1000] == [5] * 1000


def test_every_block_of_a_request_has_a_name_of_its_own() -> None:
    jobs = drawn(SHAPES["sharegpt_like"])
    for job in jobs:
        assert len(job.context) == (job.prompt + job.output - 1) // BLOCK
    unfound = [name for job in jobs for name in job.outputs if name < 0]
    assert unfound and len(set(unfound)) == len(unfound)
    assert all(job.outputs == () for job in drawn(SHAPES["sharegpt_like"], block_tokens=0))


def test_a_request_follows_the_end_of_the_one_before_and_not_before_its_time() -> None:
    jobs = [
        Job(RequestId("a"), 1.0, Tokens(1), Tokens(1), session="s"),
        Job(RequestId("other"), 2.0, Tokens(1), Tokens(1)),
        Job(RequestId("b"), 5.0, Tokens(1), Tokens(1), session="s", after=RequestId("a"), think_s=2.0),
        Job(RequestId("c"), 5.0, Tokens(1), Tokens(1), session="s", after=RequestId("b"), think_s=2.0),
    ]
    succession = Succession(jobs)
    assert [job.id for job in succession.first] == ["a", "other"]
    early, late = succession.ended(RequestId("a"), 1.5), succession.ended(RequestId("b"), 7.0)
    assert early is not None and (early.id, early.arrival_s) == ("b", 5.0)
    assert late is not None and (late.id, late.arrival_s) == ("c", 9.0)
    assert succession.ended(RequestId("c"), 9.0) is succession.ended(RequestId("a"), 9.0) is None


def test_a_trace_may_have_sessions(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0, "prompt_tokens": 35, "output_tokens": 20, "hash_ids": [1, 2, 3, 4], "session": "a"},
        {"arrival_s": 1, "prompt_tokens": 20, "output_tokens": 5, "hash_ids": [7, 8]},
        {"arrival_s": 2, "prompt_tokens": 71, "output_tokens": 9, "hash_ids": [*range(1, 9)], "session": "a"},
        {"arrival_s": 3, "prompt_tokens": 30, "output_tokens": 9, "hash_ids": [1, 5, 6], "session": "a", "think_s": 2},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    jobs = draw(Recipe(read_trace(path), None, 10.0, Tokens(1000), block_tokens=10), 0).jobs
    assert [(job.session, job.after, job.think_s) for job in jobs] == [
        ("a", None, 0.0),
        ("", None, 0.0),
        ("a", "r0", 0.0),
        ("a", "r2", 2.0),
    ]
    assert jobs[0].context == (1, 2, 3, 4, 5), "four of its blocks are in the next prompt, and 54 tokens fill five"
    assert jobs[1].outputs == ()
    assert jobs[2].names == (1, 2, 3, 4, 5, 6, 7) and not jobs[2].outputs
    path.write_text(json.dumps(rows[0] | {"session": [1]}))
    with pytest.raises(BadInput, match="neither a name nor a number"):
        read_trace(path)
