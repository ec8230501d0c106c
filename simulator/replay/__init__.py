"""Replays a recorded trace of LLM requests against an OpenAI-compatible endpoint and measures the answers.

`python -m simulator.replay --help` lists the options; benchmarks import this room, which imports `client`
and the simulator's trace reader. A trace file and an endpoint's answers come in; a JSON report, a printed text, a PNG
plot and an HTML page go out. Pure parts first:

    trace                     the input: a trace, cut to a window and scaled to the model
    stream, measurements      one streamed answer; samples of the cluster
    summary, report, text     statistics, the JSON report, the printed text
    client, probe             calls: a completion; Mell's state, migrations and moves
    run, plot, page           the schedule; the PNG plot; the HTML page
"""
