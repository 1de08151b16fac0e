/* Decodes packed integers of protobuf (protobuf.dev/programming-guides/encoding#packed): each has 7 bits in a byte, the
   lowest first, and the upper bit of all its bytes but the last is set. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_BYTES 10 /* of one integer of 64 bits */

/* Returns the integer that begins at the lowest byte of `word`, and its bytes; 0 bytes if it does not end in it. */
static int64_t of_word(uint64_t word, int *num_bytes)
{
    uint64_t last = ~word & UINT64_C(0x8080808080808080); /* the lowest of these bits is that of its last byte */
    *num_bytes = last ? (__builtin_ctzll(last) + 1) / 8 : 0;
    word &= last ^ (last - 1);
    word = (word & UINT64_C(0x007f007f007f007f)) | (word & UINT64_C(0x7f007f007f007f00)) >> 1;
    word = (word & UINT64_C(0x00003fff00003fff)) | (word & UINT64_C(0x3fff00003fff0000)) >> 2;
    return (int64_t)((word & UINT64_C(0x000000000fffffff)) | (word & UINT64_C(0x0fffffff00000000)) >> 4);
}

/* Returns 0, or -1 if an integer is cut off or too long. `out` has room for an integer for each byte below 128. */
static int decode(const unsigned char *at, const unsigned char *end, int64_t *out)
{
    while (at < end) {
        uint64_t word;
        int num_bytes = 0;
        /* Without a branch for each byte, as many of them would be mispredicted. */
        if (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ && end - at >= (ptrdiff_t)sizeof(word)) {
            memcpy(&word, at, sizeof(word));
            *out = of_word(word, &num_bytes);
        }
        if (!num_bytes) {
            uint64_t value = 0;
            do {
                if (at + num_bytes == end || num_bytes == MOST_BYTES)
                    return -1;
                value |= (uint64_t)(at[num_bytes] & 127) << (7 * num_bytes);
            } while (at[num_bytes++] >= 128);
            *out = (int64_t)value;
        }
        out++;
        at += num_bytes;
    }
    return 0;
}

struct list {
    const unsigned char *data;
    Py_ssize_t size;
};

PyDoc_STRVAR(decode_varints_doc,
"decode_varints(packed: tuple[bytes, ...]) -> tuple[bytearray, bytearray]\n--\n\n"
"Return the int64 values of packed lists of integers, one list after the other, and how many each has, int64.\n\n"
"Raises ValueError if an integer is cut off or longer than 10 bytes. Lets other threads run meanwhile.");

static PyObject *decode_varints(PyObject *Py_UNUSED(module), PyObject *packed)
{
    const Py_ssize_t num_lists = PyTuple_Size(packed);
    if (num_lists < 0)
        return NULL;
    PyObject *found = NULL, *values = NULL;
    PyObject *counts = PyByteArray_FromStringAndSize(NULL, num_lists * (Py_ssize_t)sizeof(int64_t));
    struct list *lists = PyMem_Calloc((size_t)num_lists, sizeof(*lists));
    if (!counts || !lists) {
        PyErr_NoMemory();
        goto end;
    }
    int64_t *count = (int64_t *)(void *)PyByteArray_AsString(counts), total = 0;
    for (Py_ssize_t i = 0; i < num_lists; i++) {
        char *data;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(packed, i), &data, &lists[i].size))
            goto end;
        lists[i].data = (const unsigned char *)data;
        count[i] = 0;
        for (Py_ssize_t j = 0; j < lists[i].size; j++)
            count[i] += lists[i].data[j] < 128;
        total += count[i];
    }
    if (total > PY_SSIZE_T_MAX / (Py_ssize_t)sizeof(int64_t)) {
        PyErr_NoMemory();
        goto end;
    }
    values = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)total * (Py_ssize_t)sizeof(int64_t));
    if (!values)
        goto end;
    int64_t *out = (int64_t *)(void *)PyByteArray_AsString(values);
    int is_whole = 1;
    PyThreadState *state = PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < num_lists && is_whole; i++) {
        is_whole = !decode(lists[i].data, lists[i].data + lists[i].size, out);
        out += count[i];
    }
    PyEval_RestoreThread(state);
    if (is_whole)
        found = PyTuple_Pack(2, values, counts);
    else
        PyErr_SetString(PyExc_ValueError, "a packed integer is cut off, or longer than 10 bytes");
end:
    PyMem_Free(lists);
    Py_XDECREF(values);
    Py_XDECREF(counts);
    return found;
}

static PyMethodDef functions[] = {
    {"decode_varints", decode_varints, METH_O, decode_varints_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_varints",
    .m_doc = "Decodes packed integers of protobuf.",
    .m_size = 0,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__varints(void)
{
    return PyModule_Create(&module);
}
