"""A relay at work: editions that it follows for others, and hands on. Needs no torch, and knows no sockets.

followed.py   One job in one wire format: its last editions, and who reads them
kept.py       An edition that a relay keeps, and who reads it
room.py       What a relay receives: an edition only where there is memory for it
sending.py    One reader that gets one edition
relayed.py    The jobs of a relay: each is followed while somebody reads it
upstream.py   Where a relay gets its editions from: which jobs are there
"""
