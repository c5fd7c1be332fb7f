"""A timeline: when each bucket of each step was ready, sent, staged, applied, admitted and landed.

recording.py  What is noted of the steps that are recorded; of all others, nothing
clocks.py     The clocks of shards, on this worker's own
chrome.py     A recording as a Chrome trace, which Perfetto opens
"""
