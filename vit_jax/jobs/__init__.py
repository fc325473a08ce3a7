"""The jobs of the command line: a module each, whose function `run` does the job and returns the exit status.

`commands.py` has the table of jobs, and calls `run` with the values of the flags by name. `run` checks flags and paths,
calls `startup.start` once, reads the config, the data and the weights, computes, and then writes the results and prints
where they are. It raises `UserError` for what a person can fix and `TemporaryError` for what another try may fix.

The other modules belong to jobs: `build` to all that have a config; `resume`, `summary`, `trackers` and `host_speed` to
`train`; `teacher_labels` to `prepare` and `train`; `frozen_features` to `finetune`; `report_card` to `evaluate`;
`text_towers` to evaluations with texts; `predict_table` to `predict`; `serve_http` to `serve`; `check` to
`vit_jax/check.py`; `flag_names` to jobs whose flags stand for settings.
"""
