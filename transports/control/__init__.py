"""What a sender and its receivers say to each other beside the bytes, whatever carries these: a channel of frames on
which no peer blocks, the messages that every protocol has, and whom to name when somebody leaves.
"""
