// Package safetensors reads and writes the safetensors format: a length, a JSON header that
// names every tensor with its element type, shape and byte range, and the tensors' bytes.
//
// The reader is strict and streaming. Strict: what the format's reference implementation
// refuses is refused here, with the tensor's name (duplicate keys, holes, overlaps, bytes
// that no tensor covers, shapes whose size overflows), and every length is checked against
// the file's size before memory is taken for it. Streaming: opening a file reads the header
// alone, and a read fetches the range of elements it was asked for, so that a rank of many
// reads only its part of a weight.
//
// This is own code because no Go library does both: nlpodyssey/safetensors, the one that is
// known, holds whole files in memory and had its last release in 2023.
package safetensors
