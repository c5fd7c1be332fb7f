"""A timeline: when each bucket of each step was ready, sent, staged, applied, admitted and landed.

recording.py  Records the moments of the wanted steps
clocks.py     Converts the clocks of shards to this worker's clock
chrome.py     A recording as a Chrome trace, which Perfetto opens
"""
