"""Replays a recorded trace of LLM requests against an OpenAI-compatible endpoint and measures the answers.

`python -m app.replay --help` lists the options. The layers, pure ones first:

    errors, trace     what the user gave: a trace file, cut to a window and scaled to the model
    stream, state     what the endpoint said: the bytes of one answer, one `/mell/state`
    summary, report   what that amounts to: quantiles, the JSON document, the printed text
    client, watch     the calls: one completion; Mell's own state and migrations
    run, plot         the schedule, and the picture
"""
