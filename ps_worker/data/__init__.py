"""Each worker's share of the data.

leased.py      The data of elastic jobs: batches leased from the coordinator, each used once per pass by one worker
loaders.py     Each worker's share of the data, reshuffled every epoch
look_ahead.py  Reads a loader one batch ahead of its loop
pass_position.py The script's position in the data in the modes without servers
"""
