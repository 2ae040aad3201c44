"""The feed: one stream on a Ray cluster for any number of training ranks.

`protocol` is what client and feed say to each other, `generations` who may, `retention` which steps are kept for it, `producer`
what makes them, `feed` the actor, and `client` the loader's interface to a rank.
"""
