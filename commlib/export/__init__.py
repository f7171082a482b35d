"""Save and load exported programs together with the rings that they were exported with.

The functions have the names and arguments of torch's own. Saving records the members of each ring
in the file, and loading compares them with the rings of this process. Importing commlib.export
registers the ops that a saved program calls.
"""

from commlib.export.packages import aoti_compile_and_package, aoti_load_package
from commlib.export.programs import load, save
from commlib.ops.registered import late

__all__ = ["aoti_compile_and_package", "aoti_load_package", "load", "save"]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


late.import_all()
