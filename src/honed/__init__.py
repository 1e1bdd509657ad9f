"""honed keeps a deployed AI agent learning: serve, record, curate, practise, update, gate, release, watch.

Importing the package loads neither torch nor any engine.
"""

__version__ = "0.1.0"
