"""These tests need packages of their own: `make test-libraries` installs them and sets DYNAMOTOR_LIBRARIES;
other runs leave the folder out.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("DYNAMOTOR_LIBRARIES") else ["test_*.py"]
