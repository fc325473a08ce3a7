"""The jobs of the command line. A job is a module with a function `run`, which returns the exit status.

`commands.py` has the table of jobs, and calls `run` with the values of the flags by name. `run` checks flags and paths,
calls `startup.start` once, opens the data and loads the weights, computes, writes the results and prints their paths.
`run` raises `UserError` for an error that a person can fix, and `TemporaryError` if the same command may succeed later.

The other modules are parts of jobs. This list names the jobs that use each module:

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
    check              check (its `run` is in `vit_jax/check.py`), study
    flag_names         jobs with a flag in place of a setting
"""
