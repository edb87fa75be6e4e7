package hostile

import (
	"bytes"
	"encoding/binary"
	"os"
	"strings"
)

// llmc returns a token file of llm.c: the padded header, and the tokens.
func llmc(magic, version, count int32, tokens []byte) []byte {
	head := make([]byte, 1024)
	for i, n := range []int32{magic, version, count} {
		binary.LittleEndian.PutUint32(head[4*i:], uint32(n))
	}
	return append(head, tokens...)
}

// megatron returns an index of Megatron.
func megatron(version uint64, code byte, sequences, documents uint64, rest []byte) []byte {
	b := append([]byte("MMIDIDX\x00\x00"), binary.LittleEndian.AppendUint64(nil, version)...)
	b = append(b, code)
	b = binary.LittleEndian.AppendUint64(b, sequences)
	return append(binary.LittleEndian.AppendUint64(b, documents), rest...)
}

// tokens returns hostile files of training data.
func tokens() (all []input) {
	add := func(name, file string, make func(p *sandbox)) {
		all = append(all, input{kind: "tokens", name: name, says: []string{file}, make: func(p *sandbox) []string {
			config := p.small()
			make(p)
			return []string{"--run-dir", "run", "--set", "data.path=" + file, config}
		}})
	}
	for _, kind := range unreadable[:len(unreadable)-1] { // not a sparse terabyte, which is valid text
		for _, file := range []string{"a.bin", "a.jsonl", "a.txt", "b.idx"} {
			name := file
			if file == "b.idx" {
				name = "b.bin"
			}
			add(file+" is a "+kind, name, func(p *sandbox) {
				p.write("b.bin", make([]byte, 4096))
				p.must(irregular[kind](p, p.path(file)))
			})
			if kind == "gone" && file == "b.idx" { // without an index, the .bin is read as llm.c's
				all = all[:len(all)-1]
			}
		}
	}
	for name, data := range map[string][]byte{
		"empty": nil, "short": make([]byte, 100), "zeros": make([]byte, 4096), "negative": llmc(20240520, 1, -1, nil),
		"more than there is": llmc(20240520, 1, 1<<30, make([]byte, 8)), "largest": llmc(20240801, 7, 1<<31-1, nil),
		"version": llmc(20240520, 99, 1, make([]byte, 2)), "magic": llmc(0x1b5b324a, 1, 1, make([]byte, 2)),
		"outside the vocabulary": llmc(20240801, 7, 500, bytes.Repeat([]byte{255, 255, 255, 255}, 500)),
		"weights":                llmc(20240326, 3, 1, nil), "one token": llmc(20240520, 1, 1, make([]byte, 2)),
		"json": []byte(strings.Repeat(`{"a":1}`, 1000)),
	} {
		add("llm.c "+name, "a.bin", func(p *sandbox) { p.write("a.bin", data) })
	}
	le := binary.LittleEndian
	lens := func(n ...int32) (b []byte) {
		for _, x := range n {
			b = le.AppendUint32(b, uint32(x))
		}
		return b
	}
	at := func(b []byte, n ...uint64) []byte {
		for _, x := range n {
			b = le.AppendUint64(b, x)
		}
		return b
	}
	for name, data := range map[string][]byte{
		"empty": nil, "short": []byte("MMIDIDX\x00\x00"), "version": megatron(1<<63, 8, 1, 2, nil),
		"type": megatron(1, 200, 1, 2, nil), "float": megatron(1, 6, 1, 2, nil),
		"most sequences": megatron(1, 8, 1<<64-1, 2, nil),
		"most documents": megatron(1, 8, 1, 1<<64-1, nil), "both": megatron(1, 8, 1<<36, 1<<36, nil),
		"wrap": megatron(1, 8, 1<<61, 1<<61, nil), "negative": megatron(1, 8, 1, 2, at(lens(-5), 0, 0, 1)),
		"long":      megatron(1, 8, 2, 2, at(lens(1<<31-1, 1<<31-1), 0, 1<<32-2, 0, 2)),
		"pointers":  megatron(1, 8, 2, 2, at(lens(4, 4), 8, 0, 0, 2)),
		"documents": megatron(1, 8, 2, 3, at(lens(4, 4), 0, 8, 2, 1, 0)),
		"cut":       megatron(1, 8, 1000, 2, make([]byte, 100)),
	} {
		add("Megatron "+name, "b.bin", func(p *sandbox) {
			p.write("b.bin", make([]byte, 16))
			p.write("b.idx", data)
		})
	}
	add("Megatron of holes", "b.bin", func(p *sandbox) { // as many sequences as a sparse file can hold
		p.write("b.bin", make([]byte, 16))
		p.write("b.idx", megatron(1, 8, 1<<30, 1, nil))
		p.must(os.Truncate(p.path("b.idx"), 34+12<<30+8))
	})
	for name, data := range map[string][]byte{
		"empty": nil, "no JSON": []byte("{{{\n"), "deep": append(bytes.Repeat([]byte("["), 1<<20), '\n'),
		"no text": []byte(`{"content":"x"}` + "\n"), "null": []byte(`{"text":null}` + "\n"),
		"number": []byte(`{"text":1}` + "\n"),
		"escape": []byte("{\"\x1b[2J\":1}\n"), "no UTF-8": []byte("{\"text\":\"\xff\"}\n"),
		"blank":       bytes.Repeat([]byte("\n"), 1<<20),
		"a long line": append(append([]byte(`{"text":"`), bytes.Repeat([]byte("x"), 65<<20)...), '"', '}'),
		"half":        []byte(`{"text":"` + strings.Repeat("x", 1000)),
		"keys":        []byte("{" + listed(`"%d":0`, 500_000) + "}\n"),
	} {
		add("jsonl "+name, "a.jsonl", func(p *sandbox) { p.write("a.jsonl", data) })
	}
	for name, data := range map[string][]byte{
		"a.gz": {0x1f, 0x8b, 8, 0}, "a.zip": []byte("PK\x03\x04"), "a.pt": {0x80, 2}, "a.npy": []byte("\x93NUMPY"),
		"a.parquet": []byte("PAR1"), "a.safetensors": make([]byte, 100), "a.pdf": []byte("%PDF-1.4"),
		"short.txt": []byte("x"),
	} {
		add("other "+name, name, func(p *sandbox) { p.write(name, data) })
	}
	add("many files", "many", func(p *sandbox) {
		for i := range 3000 {
			name := "x" + strings.Repeat("y", i%100) + "0" + strings.Repeat("z", i/100) + ".txt"
			p.must(os.Symlink("gone", p.path(name)))
		}
		p.must(os.Mkdir(p.path("many"), 0o755))
	})
	sortInputs(all)
	return all
}
