"""Runs a traced program one equation at a time, on concrete values, and shows each equation to a watcher."""

from ._interpreter import Call as Call
from ._interpreter import Interpreter as Interpreter
from ._interpreter import check_concrete as check_concrete
from ._interpreter import traced_call as traced_call
from ._site import Loop as Loop
from ._site import Site as Site
from ._site import Value as Value
from ._site import Watcher as Watcher
from ._site import is_narrow as is_narrow
from ._site import summed as summed
from ._site import to_host as to_host
from ._site import wide_params as wide_params
