# SPDX-License-Identifier: Apache-2.0
# Gates and their signals. A part of _core.pyx.


cdef class Gate:
    """Says which layers have been computed. `aiodatadist.LayerGate` is what users see of it."""

    def __cinit__(self, num_layers):
        cdef uint32_t layers = as_integer(num_layers, "num_layers", low=1, high=1_000_000)
        self.recorder = shared_ptr[CRecorder](new CRecorder(layers))
        self.failures = {}

    def __dealloc__(self):
        let_go_recorder(self.recorder)

    @property
    def num_layers(self):
        return self.recorder.get().gate().get().layers()

    cdef int check_not_forked(self) except -1:
        # A thread that does not exist here may hold the lock.
        if in_forked_child():
            raise ForkedError("this process was forked while a DataDist was open; its gates record nothing")
        return 0

    cdef uint32_t number(self, layer) except? 0xFFFFFFFF:
        cdef long long number = -1
        self.check_not_forked()
        if isinstance(layer, bool):
            raise ArgumentTypeError(f"layer must be an integer, got {layer}")
        try:
            number = PyNumber_Index(layer)
        except TypeError:
            raise ArgumentTypeError(f"layer must be an integer, got {type(layer).__name__}") from None
        except OverflowError:
            pass
        if not 0 <= number < self.recorder.get().gate().get().layers():
            raise ArgumentError(f"layer {shown(layer)} is outside this gate's 0..{self.num_layers - 1}",
                                hint="make the gate for as many layers as the model has")
        return <uint32_t>number

    def record(self, layer):
        # Keeps the GIL, as all short calls do: giving it up beside a busy thread may cost seconds.
        cdef uint32_t number = self.number(layer)
        if self.recorder.get().gate().get().record(number) == CGateOutcome.repeated:
            raise GateError(f"layer {number} {self.what(number)} before", hint="each layer is recorded once")

    def fail(self, layer, error=None):
        cdef uint32_t number = self.number(layer)
        if error is not None and not isinstance(error, BaseException):
            raise ArgumentTypeError(f"error must be an exception, got {type(error).__name__}")
        # There before the transfers that end by it look for it.
        mine = self.failures.setdefault(number, error) is error
        if self.recorder.get().gate().get().fail(number) == CGateOutcome.repeated:
            if mine and self.recorder.get().gate().get().recorded(number):
                self.failures.pop(number, None)
            raise GateError(f"layer {number} {self.what(number)} before", hint="a layer is recorded or fails, once")

    def what(self, uint32_t layer):
        """Say what became of a layer."""
        return "was recorded" if self.recorder.get().gate().get().recorded(layer) else "failed"

    def recorded(self, layer):
        return self.recorder.get().gate().get().recorded(self.number(layer))

    @property
    def count(self):
        """Number of recorded layers."""
        self.check_not_forked()
        return self.recorder.get().gate().get().count()

    @property
    def waiting(self):
        """Number of transfers in the engine that wait for further layers, one for each cache that a target lies in."""
        self.check_not_forked()
        return self.recorder.get().gate().get().waiting()

    def native(self, layer):
        cdef LayerSignal signal = LayerSignal.__new__(LayerSignal)
        signal.context = make_layer_signal(self.recorder, self.number(layer))
        return signal


@cython.final
cdef class LayerSignal:
    """A C function and its context that record one layer of a gate: for callbacks of C, C++ and device runtimes.

    Attributes
    ----------
    function : int
        Address of a ``void (*)(void *context)``, callable from any thread, with or without the GIL.
    context : int
        Give it as the ``void *``. It works once; later calls, and those after `release`, do nothing. It keeps the gate
        until then, also when this object is dropped.
    """

    @property
    def function(self):
        return layer_signal_function()

    @property
    def pending(self):
        """Whether it has neither been called nor released."""
        return not in_forked_child() and layer_signal_pending(self.context)

    def release(self):
        """Give it up: a call that comes later does nothing."""
        if not in_forked_child():
            release_layer_signal(self.context)
