"""What servers and workers must agree on, and nothing else.

Something belongs here only if changing it on one side alone would break the other: the job description, the bucket
layout, the framing of tensors, modes, errors, and the options of a channel.
"""
