"""The feed: one stream on a Ray cluster for any number of training ranks.

`blocks`: the rows that lie in one object; `protocol`: what clients and the feed say to each other; `generations`: who may read;
`retention`: which steps are kept; `making`: where steps come from; `streams`: a stream with its thread; `feed`: the actor; `reader`
and `client`: a rank's side, with the loader's interface.
"""
