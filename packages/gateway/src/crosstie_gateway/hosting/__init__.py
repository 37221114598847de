"""Models on shared replicas: what is loaded where, and who may change it. `host` decides, and has no clock.

Read on in this order:

    loaders         one model loaded on one replica, or put away: vLLM's sleep, llama.cpp's router, a command
    shared_pool     one pool: the moves that `host.residency` wants, made one at a time on each replica
    hosting         all pools of a process; among the workers of a machine one leads, the others follow
    residents       among machines one gateway leads: the lease, the claims, what they tell each other, over Redis

The gateway asks this room by `HostedModels`; replicas without GPUs are `emulate.hosted`.
"""
