/* The Python module _bridge: arguments of a call become Python objects, and a Python function computes.
 *
 * Tensors are CPU tensors that share the memory of the device (DLPack, no copy).
 */
#define PY_SSIZE_T_CLEAN
#include "operators.h"
#include "recorder.h"
#include "streams.h"
#include <Python.h>
#include <math.h>

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t rank;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *stride;
    uint64_t byte_offset;
} DlTensor;
typedef struct ManagedTensor {
    DlTensor tensor;
    void *context;
    void (*deleter)(struct ManagedTensor *);
} ManagedTensor;

/* DLPack's type codes by aclDataType: 0 int, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool, 10… float8 */
static const struct {
    uint8_t code, bits;
} DTYPES[] = {[0] = {2, 32}, [1] = {2, 16}, [2] = {0, 8},  [3] = {0, 32},  [4] = {1, 8},   [6] = {0, 16},  [7] = {1, 16},
              [8] = {1, 32}, [9] = {0, 64}, [10] = {1, 64}, [11] = {2, 64}, [12] = {6, 8},  [16] = {5, 64}, [17] = {5, 128},
              [27] = {4, 16}, [33] = {5, 32}, [34] = {1, 8}, [35] = {12, 8}, [36] = {10, 8}, [37] = {14, 8}};

static PyObject *from_dlpack, *run_kernel, *run_check, *checks, *describe_failure;

static void free_managed(ManagedTensor *managed) { free(managed); }

static void free_capsule(PyObject *capsule) { /* a capsule that nobody has consumed */
    if (PyCapsule_IsValid(capsule, "dltensor")) free(PyCapsule_GetPointer(capsule, "dltensor"));
}

static PyObject *make_tensor(const Tensor *from) {
    if (!from) Py_RETURN_NONE;
    if (from->dtype < 0 || from->dtype >= (int)(sizeof DTYPES / sizeof *DTYPES) || !DTYPES[from->dtype].bits)
        return PyErr_Format(PyExc_TypeError, "the emulator has no dtype %d of ACL", from->dtype);
    ManagedTensor *managed = calloc(1, sizeof *managed + sizeof from->shape + sizeof from->stride);
    int64_t *sizes = (int64_t *)(managed + 1);
    memcpy(sizes, from->shape, sizeof from->shape);
    memcpy(sizes + 8, from->stride, sizeof from->stride);
    managed->tensor = (DlTensor){.data = (char *)from->data + from->offset * DTYPES[from->dtype].bits / 8,
                               .device = {1, 0},
                               .rank = from->rank,
                               .dtype = {DTYPES[from->dtype].code, DTYPES[from->dtype].bits, 1},
                               .shape = sizes,
                               .stride = sizes + 8};
    managed->deleter = free_managed;
    PyObject *capsule = PyCapsule_New(managed, "dltensor", free_capsule);
    if (!capsule) return NULL;
    PyObject *result = PyObject_CallOneArg(from_dlpack, capsule);
    Py_DECREF(capsule);
    return result;
}

static double half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31 ? (fraction ? Py_NAN : Py_HUGE_VAL) : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return bits >> 15 ? -value : value;
}

static double bfloat(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static PyObject *make_scalar(const Scalar *from) {
    if (!from) Py_RETURN_NONE;
    const void *value = from->value;
    switch (from->dtype) {
    case 0: return PyFloat_FromDouble(*(const float *)value);
    case 1: return PyFloat_FromDouble(half(*(const uint16_t *)value));
    case 2: return PyLong_FromLong(*(const int8_t *)value);
    case 3: return PyLong_FromLong(*(const int32_t *)value);
    case 4: return PyLong_FromLong(*(const uint8_t *)value);
    case 6: return PyLong_FromLong(*(const int16_t *)value);
    case 9: return PyLong_FromLongLong(*(const int64_t *)value);
    case 10: return PyLong_FromUnsignedLongLong(*(const uint64_t *)value);
    case 11: return PyFloat_FromDouble(*(const double *)value);
    case 12: return PyBool_FromLong(*(const uint8_t *)value);
    case 16: return PyComplex_FromDoubles(((const float *)value)[0], ((const float *)value)[1]);
    case 17: return PyComplex_FromDoubles(((const double *)value)[0], ((const double *)value)[1]);
    case 27: return PyFloat_FromDouble(bfloat(*(const uint16_t *)value));
    }
    return PyErr_Format(PyExc_TypeError, "the emulator has no scalar of dtype %d of ACL", from->dtype);
}

static PyObject *make_item(char type, const void *items, uint64_t i) {
    switch (type) {
    case 'T': return make_tensor(((Tensor *const *)items)[i]);
    case 'S': return make_scalar(((Scalar *const *)items)[i]);
    case 'I': return PyLong_FromLongLong(((const int64_t *)items)[i]);
    case 'F': return PyFloat_FromDouble(((const float *)items)[i]);
    default: return PyBool_FromLong(((const uint8_t *)items)[i]);
    }
}

static PyObject *make_list(char type, const void *from) {
    if (!from) Py_RETURN_NONE;
    bool of_objects = type == 'T' || type == 'S';
    uint64_t length = of_objects ? ((const List *)from)->length : ((const Array *)from)->length;
    const void *items = of_objects ? (const void *)((const List *)from)->items : ((const Array *)from)->items;
    PyObject *result = PyList_New((Py_ssize_t)length);
    for (uint64_t i = 0; result && i < length; i++) {
        PyObject *item = make_item(type, items, i);
        if (item) PyList_SET_ITEM(result, i, item);
        else Py_CLEAR(result);
    }
    return result;
}

static PyObject *make_argument(char type, Argument from) {
    switch (type) {
    case 't': return make_tensor(from.pointer);
    case 's': return make_scalar(from.pointer);
    case 'T': case 'S': case 'I': case 'F': case 'B': return make_list(type, from.pointer);
    case 'd': return PyFloat_FromDouble(from.real);
    case 'f': return PyFloat_FromDouble(from.single);
    case '?': return PyBool_FromLong(from.integer & 0xff);
    case 'z':
        if (!from.pointer) Py_RETURN_NONE;
        return PyUnicode_FromString(from.pointer);
    case 'i': case 'e': return PyLong_FromLong((int32_t)from.integer);
    case 'u': return PyLong_FromUnsignedLong((uint32_t)from.integer);
    case 'b': return PyLong_FromLong((int8_t)from.integer);
    case 'c': return PyLong_FromLong((uint8_t)from.integer);
    case 'h': return PyLong_FromLong((int16_t)from.integer);
    case 'Q': return PyLong_FromUnsignedLongLong((uint64_t)from.integer);
    case 'q': return PyLong_FromLongLong(from.integer);
    default: Py_RETURN_NONE; /* a pointer that no kernel reads */
    }
}

static PyObject *make_arguments(const Call *from) {
    PyObject *result = PyTuple_New(from->count);
    for (int i = 0; result && i < from->count; i++) {
        PyObject *item = make_argument(from->operator->types[i], from->arguments[i]);
        if (item) PyTuple_SET_ITEM(result, i, item);
        else Py_CLEAR(result);
    }
    return result;
}

/* Write the sizes back of outputs whose size depends on the data: {index of the argument: sizes}. */
static void write_sizes(const Call *to, PyObject *sizes) {
    Py_ssize_t position = 0;
    PyObject *index, *size;
    while (PyDict_Next(sizes, &position, &index, &size)) {
        Tensor *output = to->arguments[PyLong_AsLong(index)].pointer;
        output->rank = (int32_t)PyTuple_Size(size);
        for (int i = 0; i < output->rank; i++) output->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(size, i));
    }
}

/* Turn the Python exception into the message of the device's error. Without arguments, they could not be converted. */
static void report(const Call *from, PyObject *arguments) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *text = PyObject_CallFunction(describe_failure, "sOO", from->operator->name, arguments ? arguments : Py_None, error);
    const char *utf8 = text ? PyUnicode_AsUTF8(text) : NULL;
    if (utf8) emulator_set_message(utf8);
    else {
        PyErr_Print();
        emulator_set_message("the emulator failed, see the traceback above");
    }
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

/* Return the name of an operator as a Python object. The GIL is held. */
static PyObject *name_of(Operator *operator) {
    if (!operator->python_name) operator->python_name = PyUnicode_InternFromString(operator->name);
    return operator->python_name;
}

/* Call `function(name, stream, arguments)`. It returns None, sizes of outputs, or a message and an error code. */
static PyObject *call_python(PyObject *function, const Call *from) {
    PyObject *name = name_of(from->operator), *stream = PyLong_FromLong(from->head.stream), *arguments = make_arguments(from);
    PyObject *result = name && stream && arguments ? PyObject_Vectorcall(function, (PyObject *[]){name, stream, arguments}, 3, NULL) : NULL;
    if (!result) report(from, arguments);
    Py_XDECREF(stream);
    Py_XDECREF(arguments);
    return result;
}

static int failure(PyObject *result) {
    int code = ACLNN_ERR_INNER;
    const char *text = "";
    if (PyArg_ParseTuple(result, "is", &code, &text)) emulator_set_message(text);
    else PyErr_Clear();
    return code;
}

#if PY_VERSION_HEX < 0x030D0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif

static bool has_python_ended(void) { /* taking the GIL would then end this thread */
    if (Py_IsFinalizing()) emulator_set_message("an operator was called or still queued when Python ended");
    return Py_IsFinalizing();
}

/* No garbage is collected inside a kernel or check. It could be an NPU tensor, and torch_npu's allocator may be locked by a
 * thread that waits for this kernel. */
static int kernels_running; /* the GIL protects it */
static bool collects_garbage;

static PyGILState_STATE enter_python(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    if (!kernels_running++) collects_garbage = PyGC_Disable();
    return state;
}

static void leave_python(PyGILState_STATE state) {
    if (!--kernels_running && collects_garbage) PyGC_Enable();
    PyGILState_Release(state);
}

static int run(Call *from) {
    if (has_python_ended()) return ACLNN_ERR_INNER;
    PyGILState_STATE state = enter_python();
    PyObject *result = call_python(run_kernel, from);
    int code = result ? ACL_SUCCESS : ACLNN_ERR_INNER;
    if (result && PyDict_Check(result)) write_sizes(from, result);
    else if (result && PyTuple_Check(result)) code = failure(result);
    Py_XDECREF(result);
    leave_python(state);
    return code;
}

static int check(Call *from, uint64_t *workspace) {
    if (has_python_ended()) return ACLNN_ERR_INNER;
    PyGILState_STATE state = enter_python();
    PyObject *result = call_python(run_check, from);
    int code = result ? ACL_SUCCESS : ACLNN_ERR_INNER;
    if (result && PyLong_Check(result)) *workspace = PyLong_AsUnsignedLongLong(result);
    else if (result && PyTuple_Check(result)) code = failure(result);
    Py_XDECREF(result);
    leave_python(state);
    return code;
}

static const void *find_check(Operator *operator) {
    if (Py_IsFinalizing()) return NULL; /* the call itself fails then */
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *name = name_of(operator);
    const void *found = name ? PyDict_GetItemWithError(checks, name) : NULL;
    PyErr_Clear();
    PyGILState_Release(state);
    return found;
}

static PyObject *install(PyObject *module, PyObject *arguments) {
    static const PythonSide side = {run, find_check, check};
    if (!PyArg_ParseTuple(arguments, "OOOO!O", &from_dlpack, &run_kernel, &run_check, &PyDict_Type, &checks, &describe_failure)) return NULL;
    Py_INCREF(from_dlpack);
    Py_INCREF(run_kernel);
    Py_INCREF(run_check);
    Py_INCREF(checks);
    Py_INCREF(describe_failure);
    emulator_set_python_side(&side);
    Py_RETURN_NONE;
}

static PyObject *mark_step(PyObject *module, PyObject *unused) {
    emulator_mark_step();
    Py_RETURN_NONE;
}

static PyObject *finish_queue(PyObject *module, PyObject *unused) {
    const char *failed;
    Py_BEGIN_ALLOW_THREADS
    failed = emulator_finish_queue();
    Py_END_ALLOW_THREADS
    if (!failed) Py_RETURN_NONE;
    return PyUnicode_FromString(failed);
}

static PyMethodDef methods[] = {{"mark_step", mark_step, METH_NOARGS, "mark_step(): a training step has ended"},
                                {"finish_queue", finish_queue, METH_NOARGS, "finish_queue() -> str | None: run what is queued; the message of a failed task"},
                                {"install", install, METH_VARARGS, "install(from_dlpack, run_kernel, run_check, checks, describe_failure)"},
                                {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_bridge", .m_size = -1, .m_methods = methods};
PyMODINIT_FUNC PyInit__bridge(void) { return PyModule_Create(&definition); }
