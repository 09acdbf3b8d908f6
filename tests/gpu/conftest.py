import sys
from pathlib import Path

# The oracle of the formats serves both folders.
sys.path.insert(0, str(Path(__file__).parents[1] / "quantization"))
