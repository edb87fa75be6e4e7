package hostile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
)

// raw writes a safetensors file with the given header and a sparse data section of the given size.
func (p *sandbox) raw(name, header string, data int64) string {
	path := p.write(name, append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...))
	p.must(os.Truncate(path, int64(8+len(header))+data))
	return path
}

// A header returns the header of a safetensors file, made on demand since it may be long, and the number of data bytes
// after it.
type header struct {
	text func() string
	data int64
}

// headers returns hostile headers of safetensors files.
func headers() map[string]header {
	is := func(text string) func() string { return func() string { return text } }
	many := func(n int, format string) string { return "{" + listed(format, n) + "}" }
	return map[string]header{
		"empty":        {is(""), 0},
		"no JSON":      {is("{{{{"), 0},
		"an array":     {is("[]"), 0},
		"deep":         {func() string { return `{"a":` + strings.Repeat("[", 1_000_000) }, 0},
		"deep objects": {func() string { return strings.Repeat(`{"a":`, 500_000) }, 0},
		"a long name": {func() string {
			return `{"` + strings.Repeat("n", 20<<20) + `":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`
		}, 4},
		"an odd name":   {is(`{"\u001b[2J\u009b31m\u202e":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`), 4},
		"a broken name": {is(`{"x\nFORGED":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`), 4},
		"an odd type": {func() string {
			return `{"q":{"dtype":"\u001b[2J` + strings.Repeat("x", 1<<20) + `","shape":[1],"data_offsets":[0,4]}}`
		}, 4},
		"many axes": {func() string {
			return `{"q":{"dtype":"F32","shape":[` + strings.Repeat("1,", 10<<20) + `1],"data_offsets":[0,4]}}`
		}, 4},
		"many offsets": {func() string {
			return `{"q":{"dtype":"F32","shape":[1],"data_offsets":[` + strings.Repeat("0,", 10<<20) + `4]}}`
		}, 4},
		"many keys":     {func() string { return `{"q":` + many(1_000_000, `"%d":0`) + `}` }, 0},
		"many metadata": {func() string { return `{"__metadata__":` + many(1_000_000, `"%d":"x"`) + `}` }, 0},
		"long metadata": {func() string {
			return `{"__metadata__":{"docs":"` + strings.Repeat("1,", 15<<20) + `"}}`
		}, 0},
		"many tensors": {func() string {
			return many(600_000, `"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}`)
		}, 0},
		"tensors at max": {func() string {
			return many(260_000, `"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}`)
		}, 0},
		"overflow": {
			is(`{"q":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]}}`), 4},
		"overflow to 0": {
			is(`{"q":{"dtype":"F32","shape":[0,9223372036854775807,9223372036854775807],"data_offsets":[0,0]}}`), 0},
		"negative":  {is(`{"q":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`), 4},
		"backwards": {is(`{"q":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}`), 4},
		"beyond":    {is(`{"q":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}`), 4},
		"overlap": {
			is(`{"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"k":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`), 4},
		"twice": {
			is(`{"q":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"q":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}`), 8},
		"long number": {func() string {
			return `{"q":{"dtype":"F32","shape":[` + strings.Repeat("9", 20<<20) + `],"data_offsets":[0,4]}}`
		}, 4},
		"spaces":      {func() string { return `{` + strings.Repeat(" ", 30<<20) + `}` }, 0},
		"no UTF-8":    {is("{\"\xff\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}"), 4},
		"long header": {func() string { return `{"__metadata__":{"a":"` + strings.Repeat("x", 60<<20) + `"}}` }, 0},
		"long but read": {func() string {
			return `{"__metadata__":{"a":"` + strings.Repeat("x", 33_000_000) + `"}}`
		}, 0},
		"escapes": {func() string { return `{"__metadata__":{"a":"` + strings.Repeat(`\u001b`, 5_000_000) + `"}}` }, 0},
	}
}

// lengths returns hostile lengths of a header.
var lengths = map[string]uint64{
	"2^63":     1 << 63,
	"2^64-1":   1<<64 - 1,
	"2^62":     1 << 62,
	"100 MB":   100_000_000,
	"one more": 1,
}

// shape is a config.json with the model of the small config.
const shape = `{"model_type":"llama","architectures":["LlamaForCausalLM"],"vocab_size":256,"hidden_size":16,` +
	`"intermediate_size":32,"num_hidden_layers":1,` +
	`"num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":512,"rms_norm_eps":1e-5`

// fromModel returns a command that trains from the directory m, on bytes if m has no tokenizer.
func fromModel(p *sandbox) []string {
	path := p.small()
	text := strings.Replace(yaml, yaml[:strings.Index(yaml, "\n")], "model: {from: m}", 1)
	if _, err := os.Lstat(p.path("m/tokenizer.json")); err == nil {
		text = strings.Replace(text, "tokenizer: bytes, ", "", 1)
	}
	p.must(os.WriteFile(path, []byte(text), 0o644))
	return []string{"--run-dir", "run", path}
}

// models returns hostile Hugging Face directories.
func models() (all []input) {
	add := func(name string, says []string, make func(p *sandbox)) {
		all = append(all, input{kind: "model", name: name, says: says, make: func(p *sandbox) []string {
			p.must(os.Mkdir(p.path("m"), 0o755))
			p.write("m/config.json", []byte(shape+"}"))
			make(p)
			return fromModel(p)
		}})
	}
	for name, h := range headers() {
		add("header "+name, []string{"/m"}, func(p *sandbox) { p.raw("m/model.safetensors", h.text(), h.data) })
	}
	for name, n := range lengths {
		add("length "+name, []string{"model.safetensors"}, func(p *sandbox) {
			p.write("m/model.safetensors", binary.LittleEndian.AppendUint64(nil, n))
		})
	}
	for _, kind := range unreadable {
		for _, name := range []string{"config.json", "model.safetensors", "model.safetensors.index.json"} {
			add(name+" is a "+kind, []string{name}, func(p *sandbox) {
				_ = os.Remove(p.path("m/config.json"))
				if name != "config.json" {
					p.write("m/config.json", []byte(shape+"}"))
				}
				p.must(irregular[kind](p, p.path("m/"+name)))
			})
		}
	}
	for name, text := range map[string]string{
		"empty": "", "array": "[]", "null": "null", "deep": strings.Repeat("[", 3_000_000),
		"deep objects":            strings.Repeat(`{"a":`, 800_000),
		"a long string":           `{"model_type":"` + strings.Repeat("x", 3<<20) + `"}`,
		"escape":                  `{"model_type":"\u001b[2J\u009b\u202e"}`,
		"escape in architectures": `{"architectures":["\u001b[2J\u009b\u202e"]}`, "break": `{"model_type":"x\nFORGED"}`,
		"many architectures": `{"architectures":[` + strings.Repeat(`"x",`, 200_000) + `"x"]}`,
		"many keys":          "{" + listed(`"%d":0`, 300_000) + "}",
		"values":             `{"x":[` + strings.Repeat("0,", 2_000_000) + `0]}`, "too long": strings.Repeat(" ", 5<<20),
		"huge vocab": strings.Replace(shape, "256", "2147483648", 1) + "}",
		"huge everything": strings.NewReplacer("256", "2147483647", ":16", ":2147483646", ":32", ":2147483647", `layers":1`,
			`layers":65536`).Replace(shape) + "}",
		"many layers": strings.Replace(shape, `layers":1`, `layers":65536`, 1) + "}",
		"layers":      strings.Replace(shape, `layers":1`, `layers":999999999`, 1) + "}",
		"layer types": shape + `,"layer_types":[` + strings.Repeat(`"\u001b[2J",`, 100_000) + `"x"]}`,
		"layer types at most": strings.Replace(shape, `layers":1`, `layers":65536`, 1) + `,"layer_types":[` +
			strings.Repeat(`"x",`, 65_535) + `"x"]}`,
		"numbers": shape + `,"rope_theta":1e999}`, "long number": shape + `,"rope_theta":` + strings.Repeat("9", 1<<20) + `}`,
		"negative": strings.Replace(shape, "256", "-256", 1) + "}",
		"float":    strings.Replace(shape, "256", "256.5", 1) + "}",
		"rope": shape + `,"rope_scaling":{"rope_type":"yarn","factor":1e300,` +
			`"original_max_position_embeddings":2147483647}}`,
		"twice": shape + `,"vocab_size":9223372036854775807}`, "tokens": shape + `,"eos_token_id":"\u001b[2J",` +
			`"bos_token_id":[` + strings.Repeat("1,", 100_000) + `1]}`,
	} {
		add("config.json "+name, []string{"m"}, func(p *sandbox) { p.write("m/config.json", []byte(text)) })
	}
	one := `{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}`
	for name, index := range map[string]string{
		"empty": "", "deep": strings.Repeat("[", 3_000_000), "deep map": `{"weight_map":` + strings.Repeat(`{"a":`, 800_000),
		"values":         `{"weight_map":{` + listed(`"%d":"x"`, 2_000_000) + "}}",
		"missing shards": `{"weight_map":{` + listed(`"%d":"gone-%[1]d.safetensors"`, 100_000) + "}}",
		"some missing":   `{"weight_map":{` + listed(`"%d":"gone-%[1]d.safetensors"`, 1500) + "}}",
		"strangers":      `{"weight_map":{` + listed(`"%d":"one.safetensors"`, 250_000) + "}}",
		"escape":         `{"weight_map":{"\u001b[2J\u009b":"\u001b[2J\u009b"}}`,
		"outside":        `{"weight_map":{"a":"../../outside/precious","b":"/etc/passwd","c":"..","d":".","e":""}}`,
		"break":          `{"weight_map":{"a\nFORGED":"x\nFORGED"}}`,
		"long names":     `{"weight_map":{"` + strings.Repeat("n", 20<<20) + `":"` + strings.Repeat("f", 20<<20) + `"}}`,
		"too long":       strings.Repeat(" ", 65<<20), "number": `{"weight_map":{"a":` + strings.Repeat("9", 8<<20) + `}}`,
		"a pipe": `{"weight_map":{"a":"pipe.safetensors"}}`, "a folder": `{"weight_map":{"a":"folder"}}`,
		"config": `{"weight_map":{"a":"config.json"}}`, "itself": `{"weight_map":{"a":"model.safetensors.index.json"}}`,
	} {
		add("index "+name, []string{"index.json"}, func(p *sandbox) {
			p.write("m/model.safetensors.index.json", []byte(index))
			p.raw("m/one.safetensors", one, 4)
			p.must(errors.Join(irregular["pipe"](p, p.path("m/pipe.safetensors")), os.Mkdir(p.path("m/folder"), 0o755)))
		})
	}
	for name, links := range map[string]int{"1500 links": 1500, "5000 links": 5000} {
		add(name+" to one shard", []string{"index.json"}, func(p *sandbox) {
			p.raw("m/0.safetensors", `{"__metadata__":{"a":"`+strings.Repeat("x", 1<<20)+`"},`+one[1:], 4)
			for i := 1; i < links; i++ {
				p.must(os.Link(p.path("m/0.safetensors"), p.path(fmt.Sprintf("m/%d.safetensors", i))))
			}
			shards := listed(`"%d":"%[1]d.safetensors"`, links)
			p.write("m/model.safetensors.index.json", []byte(`{"weight_map":{`+shards+"}}"))
		})
	}
	add("links that lead out", []string{"leads out"}, func(p *sandbox) {
		p.must(os.Symlink(p.outside+"/precious", p.path("m/model.safetensors")))
	})
	for name, text := range map[string]string{
		"empty": "", "array": "[]", "deep": strings.Repeat("[", 3_000_000), "deep objects": strings.Repeat(`{"a":`, 500_000),
		"escape":          `{"model":{"type":"\u001b[2J\u009b\u202e"}}`,
		"break":           `{"model":{"type":"x\nFORGED"}}`,
		"huge vocabulary": `{"model":{"type":"BPE","vocab":{` + listed(`"%d":%[1]d`, 2_000_000) + `},"merges":[]}}`,
		"huge merges":     `{"model":{"type":"BPE","vocab":{"a":0},"merges":[` + strings.Repeat(`"a a",`, 2_000_000) + `"a a"]}}`,
		"values":          `{"x":[` + strings.Repeat("0,", 20_000_000) + `0]}`,
	} {
		add("tokenizer.json "+name, []string{"tokenizer"}, func(p *sandbox) { p.write("m/tokenizer.json", []byte(text)) })
	}
	for _, kind := range unreadable {
		add("tokenizer.json is a "+kind, []string{"tokenizer"}, func(p *sandbox) {
			p.must(irregular[kind](p, p.path("m/tokenizer.json")))
		})
	}
	add("a pickle", []string{"pickle"}, func(p *sandbox) { p.write("m/pytorch_model.bin", []byte("\x80\x02")) })
	sortInputs(all)
	return all
}
