package data

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// maxWindow bounds the window of zstd, as the command of that name does.
const maxWindow = 128 << 20

// unpacked returns the name of a file without .gz or .zst.
func unpacked(path string) (name string, compressed bool) {
	if ext := filepath.Ext(path); strings.EqualFold(ext, ".gz") || strings.EqualFold(ext, ".zst") {
		return strings.TrimSuffix(path, ext), true
	}
	return path, false
}

// An unpacker reads the text of a compressed file as a stream.
type unpacker struct {
	io.Reader
	f    *os.File
	left int64 // bytes of text that may follow
}

// unpack returns a reader of a file's text, and a function that frees it.
func unpack(f *os.File, path string, size int64) (io.Reader, func(), error) {
	name, compressed := unpacked(path)
	if !compressed {
		return f, func() {}, nil
	}
	if ext := strings.ToLower(filepath.Ext(name)); slices.Contains([]string{".bin", ".idx", ".parquet", ".arrow"}, ext) {
		return nil, nil, fmt.Errorf("only text and .jsonl are read compressed, not %s; unpack it first", ext)
	}
	if size == 0 { // zstd's reader would accept it
		return nil, nil, errors.New("0 bytes; a compressed file has a header: it is cut short")
	}
	u := &unpacker{f: f, left: expansion(size)}
	if strings.EqualFold(filepath.Ext(path), ".gz") {
		z, err := gzip.NewReader(f)
		if err != nil {
			return nil, nil, u.damaged(err)
		}
		u.Reader = z
		return u, func() {}, nil
	}
	z, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, nil, u.damaged(err)
	}
	u.Reader = z
	return u, z.Close, nil
}

func (u *unpacker) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	if u.left -= int64(n); u.left < 0 {
		return 0, errors.New("it expands to more than 1,100 times its size; such repeated text is not read")
	}
	if err != nil && err != io.EOF {
		err = u.damaged(err)
	}
	return n, err
}

// damaged names the place in the compressed file. An early end is never io.EOF, which would end the text.
func (u *unpacker) damaged(err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	at, _ := u.f.Seek(0, io.SeekCurrent)
	return fmt.Errorf("before byte %d of the compressed file: %w; it is damaged or cut short", at, cause(err))
}

// A heldText is a compressed file of text in memory, with one token for each byte.
type heldText struct {
	tokenFile
	text string
}

func (h heldText) read(_ io.ReaderAt, dst []int32, at int64) error {
	return h.tokenFile.read(strings.NewReader(h.text), dst, at)
}

func hold(f *os.File, path string, size int64, eos int) (codec, error) {
	r, free, err := unpack(f, path, size)
	if err != nil {
		return nil, err
	}
	defer free()
	text, err := readText(r, path, size)
	return heldText{rawText(int64(len(text)), eos), text}, err
}
