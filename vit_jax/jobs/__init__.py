"""The jobs of the command line. Each is a module, whose function `run` does the job and returns the exit status.

`commands.py` has the table of jobs, and calls `run` with the values of the flags by name. `run` checks flags and paths,
calls `startup.start` once, reads the config, the data and the weights, computes, and then writes the results and prints
where they are. It raises `UserError` for what a person can fix and `TemporaryError` for what another try may fix.

The other modules are parts of jobs:

    build              all jobs that have a config: data, network, objective, layout
    startup            all jobs that compute: logging, devices, processes
    resume, summary, trackers, host_speed      train
    teacher_labels     prepare, train
    frozen_features    finetune
    report_card        evaluate
    text_towers        evaluations with texts
    report_curves      report
    predict_table      predict
    serve_http         serve
    check              `vit_jax/check.py`, study
    flag_names         jobs with a flag in place of a setting
"""
