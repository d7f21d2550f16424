"""The training loop; this file must exist, or train.py would win `import train`."""
