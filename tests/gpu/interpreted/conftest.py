"""These tests run the kernels in Triton's interpreter, which is chosen when the kernels are imported."""

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "run these tests with TRITON_INTERPRET=1"
