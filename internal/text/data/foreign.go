package data

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

// otherFormats lists kinds of files that are not text. As text their bytes would train silently.
var otherFormats = []struct {
	what  string
	exts  []string
	magic []string
	at    int  // of the magic
	words bool // the magic is letters, and a text may begin with them
	fix   string
}{
	{what: "a NumPy array", exts: []string{".npy"}, magic: []string{"\x93NUMPY"},
		fix: asTokens},
	{what: "a pickle, as PyTorch writes", exts: []string{".pt", ".pth", ".pkl", ".pickle"},
		magic: []string{"\x80\x02", "\x80\x03", "\x80\x04", "\x80\x05"},
		fix:   asTokens},
	{what: "a zip archive, as NumPy and PyTorch write", exts: []string{".zip", ".npz"}, magic: []string{"PK\x03\x04"},
		fix: "unpack it, or " + asTokens},
	{what: "HDF5", exts: []string{".h5", ".hdf5"}, magic: []string{"\x89HDF"}, fix: asTokens},
	{what: "safetensors", exts: []string{".safetensors"}, fix: asTokens},
	{what: "Parquet", magic: []string{"PAR1"}, words: true, fix: "end its name in .parquet"},
	{what: "Arrow", exts: []string{".feather"}, magic: []string{"ARROW1"}, words: true, fix: asLines},
	{what: "an Arrow stream", magic: []string{"\xff\xff\xff\xff"}, fix: "end its name in .arrow"},
	{what: "compressed by gzip", magic: []string{"\x1f\x8b"}, fix: "end its name in .gz, as in a.jsonl.gz"},
	{what: "compressed by zstd", magic: []string{"\x28\xb5\x2f\xfd"}, fix: "end its name in .zst, as in a.jsonl.zst"},
	{what: "compressed", exts: []string{".xz", ".bz2", ".lz4"},
		magic: []string{"\xfd7zXZ\x00", "\x04\x22\x4d\x18"}, fix: "unpack it first"},
	{what: "compressed by bzip2", magic: []string{"1AY&SY"}, at: 4, words: true, fix: "unpack it first"},
	{what: "a tar archive", exts: []string{".tar", ".tgz"}, magic: []string{"ustar"}, at: 257, words: true,
		fix: "unpack it first"},
	{what: "PDF", exts: []string{".pdf"}, magic: []string{"%PDF-"}, words: true, fix: asText},
	{what: "a table", exts: []string{".csv", ".tsv", ".xls"}, fix: asLines},
	{what: "markup", exts: []string{".html", ".htm", ".xhtml", ".xml"}, fix: asText},
	{what: "a document of an office program",
		exts: []string{".doc", ".docx", ".odt", ".rtf", ".epub", ".xlsx", ".ppt", ".pptx"}, fix: asText},
	{what: "an image", exts: []string{".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".svg"},
		magic: []string{"\x89PNG", "\xff\xd8\xff", "GIF8"}, words: true, fix: noText},
	{what: "sound or video",
		exts: []string{".mp3", ".wav", ".flac", ".ogg", ".mp4", ".mkv", ".avi", ".mov", ".webm"}, fix: noText},
	{what: "a program", exts: []string{".exe", ".so", ".o", ".a", ".dll", ".class", ".pyc"},
		magic: []string{"\x7fELF"}, fix: noText},
	{what: "a database", exts: []string{".db", ".sqlite", ".sqlite3"},
		magic: []string{"SQLite format 3\x00"}, fix: asLines},
}

const (
	asTokens = "write its tokens as .bin files of llm.c, which docs/formats.md describes"
	asText   = "write its text as .txt"
	noText   = "narrow the glob to files of text"
	asLines  = `write its texts as .jsonl, an object with a string "text" a line`
)

// foreignHead bounds the bytes at the start that identify a file.
const foreignHead = 512

// checkText refuses a file that is not text, by its name and its first bytes.
func checkText(f io.ReaderAt, path string, size int64) error {
	head := make([]byte, min(size, foreignHead))
	if err := readFull(f, head, 0); err != nil {
		return err
	}
	ext, text := strings.ToLower(filepath.Ext(path)), looksLikeText(head)
	for _, k := range otherFormats {
		if k.words && text {
			k.magic = nil
		}
		begun := string(head[min(k.at, len(head)):])
		if slices.ContainsFunc(k.magic, func(m string) bool { return strings.HasPrefix(begun, m) }) {
			return fmt.Errorf("this is %s, which is not read as text; %s", k.what, k.fix)
		}
		if slices.Contains(k.exts, ext) {
			return fmt.Errorf("by its name, %s, this is %s, which is not read as text; %s; if it is text, name it .txt",
				ext, k.what, k.fix)
		}
	}
	if at := bytes.IndexByte(head, 0); at >= 0 {
		return fmt.Errorf("byte %d is 0, so this is not text; "+
			"if it is UTF-16, convert it, such as with iconv -f utf-16 -t utf-8", at)
	}
	return nil
}

// looksLikeText reports whether the head of a file may be text. The binary formats have bytes there that text lacks.
func looksLikeText(head []byte) bool {
	for _, b := range head {
		if b < 0x20 && b != '\t' && b != '\n' && b != '\r' && b != '\f' || b == 0x7f {
			return false
		}
	}
	for cut := range min(utf8.UTFMax, len(head)+1) { // the last rune may continue after the head
		if utf8.Valid(head[:len(head)-cut]) {
			return true
		}
	}
	return false
}
