"""Real vLLM servers on this machine's CPU, with small checkpoints of their own.

For end-to-end tests, the vLLM demo and the serving benchmark. Not part of the package: it needs
``vllm`` in the environment, which the wheel of ``rd2h`` does not.
"""
