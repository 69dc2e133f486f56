"""What is decided with the whole program in view, before any pass runs; nothing here changes a program.

`products.py`, to be read first, visits every product, including those in loops, branches and calls, and finds those
that are no layers of a network. `causes.py` decides about one product: by what its operands were computed from
(`provenance.py`, for the carries of loops `recurrences.py`), and by what is computed from its result (`consumers.py`).
`derivatives.py` finds the derivatives of these products. Passes see none of this: the entry of such a product is a
`WideProduct` in place of the table's. The same visit finds sums that update parameters (`updates.py`) and the states of
unrolled loops (`unrolled.py`).
"""
