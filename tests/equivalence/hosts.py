"""A network of several hosts within this process: see fairmesh.testing."""

from fairmesh.testing.hosts import InProcess, Post, Threads, on_hosts

__all__ = ["InProcess", "Post", "Threads", "on_hosts"]
