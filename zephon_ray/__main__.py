"""`python -m zephon_ray` is `zephon-ray`."""

from __future__ import annotations

from zephon_ray.cli.main import main

if __name__ == "__main__":
    main()
