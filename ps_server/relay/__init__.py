"""A relay: it follows jobs, keeps their newest editions, and sends them on to readers. Needs no torch, opens no socket.

followed.py   One job in one wire format: its last editions, and their readers
kept.py       An edition that a relay keeps, and its readers
room.py       The memory into which a relay receives: an edition only if there is room for it
sending.py    One reader that gets one edition
relayed.py    The jobs of a relay: each is followed while it has readers
upstream.py   The servers or relays from which a relay gets its editions, and the jobs that they have
"""
