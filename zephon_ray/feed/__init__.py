"""The feed: one stream on a Ray cluster for any number of training ranks.

Where steps are made: `production`, with `lane_team`, `lane_worker`, `units` and `blocks`. Who reads them: `protocol`, `generations`,
`retention`, `making`, `streams` and the actor, `feed`. A rank's side, with the loader's interface: `link`, `reader`, `client`.
"""
