"""The peer tier: objects that other machines of a fleet have stored, behind one small interface (`base.Peer`).

The engine of the fleet runs in a process of its own (`worker`), which shares nothing with this one but a socket and a
bounded piece of memory: whatever it does, hangs or dies of costs misses, and never a thread or a byte of SGLang's.
"""
