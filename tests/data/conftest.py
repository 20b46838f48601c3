from tests.cli.conftest import called

__all__ = ["called"]
