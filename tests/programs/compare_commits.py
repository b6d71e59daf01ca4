import sys
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1]).parent))
import commits

benchmark, package, *arguments = sys.argv[1:]
print(commits.run(Path(package), benchmark, *arguments))
