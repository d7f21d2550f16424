"""The lossless runtime and its measurements; this file must exist, or eval.py would win `import eval`."""
