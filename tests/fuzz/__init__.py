"""Hostile bundles and adapters, by the thousand: see mutator.py for what is done, worker.py for
what must hold.
"""
