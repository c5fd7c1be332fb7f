"""What servers and workers must agree on, and nothing else.

Something belongs here only if changing it on one side alone would break the other: the job description, the bucket
layout, the framing of tensors, modes, errors, and the options of a channel.
"""

import os

# It is read when grpc is imported, so it stands before every import of it. What forks here is a DataLoader, whose
# processes never call anyone; grpc's fork handlers fill the log then, and have been seen to crash the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Below that, grpc writes a line for each handshake that fails: whoever reaches a port could fill a server's log, and a
# user would find our one clear line beneath it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
