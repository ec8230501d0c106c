"""Several models on one set of devices: the devices that a service level takes, with Mell and with others.

`mell plan --models` is this room. It imports the world, the fleets, the traces and the outcome. A trace with models, a
file of models and a level come in; a JSON document, a table and a picture go out. Pure parts first:

    files      the file of models, checked
    outcome    the service of each model, and of all
    baselines  static shares, and devices that swap whole models
    cases      one run of a contender on a number of devices
    search     the fewest devices of each contender that keep the level
    text       the table
    picture    the memory of Mell's devices over the window
    report     the whole plan, from the command line
"""
