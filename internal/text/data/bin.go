package data

import (
	"encoding/binary"
	"fmt"
	"io"
	"iter"
	"slices"
)

// A tokenFile holds tokens of one width without gaps.
type tokenFile struct {
	header int64 // bytes before the first
	width  int64 // bytes of a token
	count  int64
	signed bool
	docs   []int64 // ends of documents, in tokens; none if only a token marks them
	eos    []int32 // one token appended to the file, or none
}

// rawText returns a file of text with one token for each byte. It is one document, with eos at its end; -1: none.
func rawText(size int64, eos int) tokenFile {
	t := tokenFile{width: 1, count: size}
	if size == 0 { // no document
		return t
	}
	if eos >= 0 {
		t.eos = []int32{int32(eos)}
	}
	t.docs = []int64{t.tokens()}
	return t
}

func (t tokenFile) tokens() int64 { return t.count + int64(len(t.eos)) }

func (t tokenFile) where(at int64) string {
	return fmt.Sprintf("token %d (byte %d)", at, t.header+at*t.width)
}

func (t tokenFile) ends() iter.Seq[int64] { return slices.Values(t.docs) }

func (t tokenFile) read(f io.ReaderAt, dst []int32, at int64) error {
	buf := make([]byte, min(int64(len(dst)), scanChunk)*t.width)
	le := binary.LittleEndian
	if n := t.count - at; int64(len(dst)) > n {
		copy(dst[n:], t.eos)
		dst = dst[:n]
	}
	for len(dst) > 0 {
		n := min(int64(len(dst)), scanChunk)
		b := buf[:n*t.width]
		if err := readFull(f, b, t.header+at*t.width); err != nil {
			return err
		}
		switch t.width {
		case 1:
			for i := range n {
				dst[i] = int32(b[i])
			}
		case 2:
			for i := range n {
				dst[i] = int32(le.Uint16(b[2*i:]))
			}
		case 4:
			for i := range n {
				dst[i] = int32(le.Uint32(b[4*i:]))
			}
		case 8:
			for i := range n {
				dst[i] = int32(min(le.Uint64(b[8*i:]), 1<<32-1)) // negative above an int32, so never valid
			}
		}
		if t.signed && t.width < 4 {
			shift := 32 - 8*t.width
			for i := range n {
				dst[i] = dst[i] << shift >> shift
			}
		}
		dst, at = dst[n:], at+n
	}
	return nil
}

func (t tokenFile) id(f io.ReaderAt, at int64) (int64, error) {
	var b [8]byte
	if err := readFull(f, b[:t.width], t.header+at*t.width); err != nil {
		return 0, err
	}
	id := int64(binary.LittleEndian.Uint64(b[:]))
	if t.signed {
		shift := 64 - 8*t.width
		id = id << shift >> shift
	}
	return id, nil
}

// Files of llm.c begin with a header of 256 little-endian int32, the first a magic number.
const (
	llmcHeader    = 1024
	magicGPT2     = 20240520
	magicLlama3   = 20240801
	versionGPT2   = 1
	versionLlama3 = 7
)

// otherMagics lists files of llm.c without training tokens.
var otherMagics = map[int32]string{
	20240328: "a tokenizer.bin of llm.c",
	20240522: "an evaluation file of llm.c (HellaSwag, MMLU)",
	20240326: "GPT-2 weights of llm.c",
	20240803: "Llama 3 weights, or a debug state, of llm.c",
	20240327: "a debug state of llm.c",
	20240527: "a training state of llm.c",
}

// llmc reads the header of a token file: magic 20240520, version 1, uint16 tokens; or magic 20240801, version 7, uint32
// tokens.
func llmc(f io.ReaderAt, size int64, vocab int) (codec, error) {
	var h [12]byte
	if size < llmcHeader {
		return nil, fmt.Errorf("%d bytes are too short for the header of 1024 bytes that a token file of llm.c has; "+
			"for raw tokens without a header (nanoGPT) put one in front, for text use the extension .txt", size)
	}
	if err := readFull(f, h[:], 0); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	magic, version, count := int32(le.Uint32(h[:])), int32(le.Uint32(h[4:])), int32(le.Uint32(h[8:]))
	t := tokenFile{header: llmcHeader, count: int64(count)}
	want := int32(versionGPT2)
	switch magic {
	case magicGPT2:
		t.width = 2
	case magicLlama3:
		t.width, want = 4, versionLlama3
	default:
		if what, ok := otherMagics[magic]; ok {
			return nil, fmt.Errorf("magic number %d: this is %s, not tokens to train on", magic, what)
		}
		return nil, fmt.Errorf(
			"begins with %d, not with the magic number of a token file of llm.c: 20240520 (uint16) or "+
				"20240801 (uint32); "+
				"it may be raw tokens without a header (nanoGPT), which need one, or Megatron's .bin without its .idx",
			magic)
	}
	if version != want {
		return nil, fmt.Errorf("magic number %d with version %d; version %d is known", magic, version, want)
	}
	if count < 0 {
		return nil, fmt.Errorf("the header claims %d tokens; llm.c counts in an int32, split the file", uint32(count))
	}
	if size != t.header+t.count*t.width {
		return nil, fmt.Errorf(
			"%d bytes, but the header claims %d tokens of %d bytes, which makes %d: the file is cut "+
				"short, damaged or still being written",
			size, count, t.width, t.header+t.count*t.width)
	}
	if magic == magicGPT2 && vocab > 1<<16 && count > 0 {
		return nil, fmt.Errorf("this is a version 1 (uint16) file, as of GPT-2; vocab_size %d needs version 7 (uint32)",
			vocab)
	}
	return t, nil
}
