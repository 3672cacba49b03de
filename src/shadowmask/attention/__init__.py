"""The registered attention function and the sessions that drive it.

``kernel`` attends, ``interface`` plugs into Hugging Face models, ``sampling`` and ``replay`` are the
sampler's and the learner's sessions.
"""
