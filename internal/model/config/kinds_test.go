package config

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// The first records of the files decide the packing of documents under auto.
func TestRecordsDecideHowDocumentsArePacked(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"text.jsonl": "\n" + `{"text":"a"}`, "ids.jsonl": `{"input_ids":[1]}`, "empty.jsonl": "",
		"masked.jsonl": `{"input_ids":[1],"loss_mask":[1]}`, "labels.jsonl": `{"input_ids":[1],"labels":[1]}`,
		"chat.jsonl": `{"messages":[]}`, "sharegpt.jsonl": `{"conversations":[]}`,
		"completion.jsonl": `{"prompt":"a","completion":"b"}`, "bad.jsonl": "{", "plain.txt": "a",
		"set/state.json": "{}", "set/data-00000.arrow": "", "dict/dataset_dict.json": "{}", "dir/a.txt": "",
		"more.jsonl.gz": "",
	} {
		write(t, filepath.Join(dir, name), text)
	}
	for _, tc := range []struct {
		data     string
		pack     string // as written: data.pack_documents and data.overlong
		separate bool
		whole    bool
		fault    string
	}{
		{"path: text.jsonl", "false split", false, false, ""},
		{"path: plain.txt, pack_documents: true", "true split", true, false, ""},
		{"path: ids.jsonl", "false split", false, false, ""},
		{"path: masked.jsonl", "false drop", true, true, ""},
		{"path: labels.jsonl", "false drop", true, true, ""},
		{"path: masked.jsonl, pack_documents: true", "true drop", true, true, ""},
		{"path: chat.jsonl", "true drop", true, true, ""},
		{"path: sharegpt.jsonl", "true drop", true, true, ""},
		{"path: completion.jsonl", "true drop", true, true, ""},
		{"path: completion.jsonl, pack_documents: false", "false drop", true, true, ""},
		{"path: '{empty,chat}.jsonl'", "true drop", true, true, ""},
		{"path: '{more.jsonl.gz,text.jsonl}'", "false split", false, false, ""},
		{"path: '{plain.txt,text.jsonl}'", "", false, false, "data.path: the glob matches files of different kinds"},
		{"path: bad.jsonl", "auto auto", false, false, ""},
		{"path: [chat.jsonl, text.jsonl]", "true auto", true, true, ""},
		{"path: text.jsonl, validation: {path: [{path: chat.jsonl, weight: 1}], every: 1}", "false auto", true, false, ""},
		{"path: text.jsonl, pack_documents: true, overlong: drop", "true drop", true, true, ""},
		{"path: text.jsonl, overlong: drop", "", false, false, "data.overlong: drop keeps the documents"},
		{"path: chat.jsonl, overlong: split", "", false, false, "data.overlong: split would cut the conversations of"},
		{"path: text.jsonl, overlong: split, validation: {path: masked.jsonl, every: 1}", "", false, false,
			"data.overlong: split would cut"},
		{"path: set", "auto auto", false, false, ""},
		{"path: dict", "", false, false, "dict has several splits; name one, such as dict/train"},
		{"path: dir", "", false, false, "dir is a directory; write a glob of its files, such as dir/*.txt"},
	} {
		text := leastModel + "data: {tokenizer: bytes, " + tc.data + "}\n"
		c, err := load(filepath.Join(dir, "t.yaml"), []byte(text), Options{}, osDisk)
		if tc.fault != "" {
			if err == nil || !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("%s: %v, want %q", tc.data, err, tc.fault)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", tc.data, err)
			continue
		}
		got := fmt.Sprint(keyAt["data.pack_documents"].value(c), " ", c.Data.Overlong)
		if got != tc.pack || c.Data.PackDocuments != tc.separate || c.Data.Whole(c.Data.Path) != tc.whole {
			t.Errorf("%s: %s, separate %v, whole %v", tc.data, got, c.Data.PackDocuments, c.Data.Whole(c.Data.Path))
		}
	}
}

func TestSourcesHaveNames(t *testing.T) {
	for want, paths := range map[string][]string{
		"source":       {"/d/a.txt"},
		"code prose":   {"/d/code/*.bin", "/d/prose.jsonl.gz"},
		"a/val b/val":  {"/d/a/val.jsonl", "/d/b/val.jsonl"},
		"source b":     {"/d/*.bin", "/d/b.bin"},
		"source a a-2": {"/d/*.bin", "/d/a.bin", "/d/a.txt"},
	} {
		var f Files
		for _, p := range paths {
			f = append(f, File{Path: p})
		}
		if got := strings.Join(f.Names(), " "); got != want {
			t.Errorf("%v: %s, want %s", paths, got, want)
		}
	}
}

// data.cache is relative to the config, or as a flag to the working directory. By default small files are not cached.
func TestTheTokenCacheHasADirectory(t *testing.T) {
	dir, user := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CACHE_HOME", user)
	for _, tc := range []struct {
		yaml, flag, want string
		least            int64
	}{
		{"", "", filepath.Join(user, "cprun", "tokens"), uncached},
		{", cache: c", "", filepath.Join(dir, "c"), 0},
		{"", "data.cache=c", "/work/c", 0},
		{", cache: /c", "", "/c", 0},
	} {
		var o Options
		if tc.flag != "" {
			o.Set = []string{tc.flag}
		}
		o.NoFiles, o.Known = true, true
		c, err := load(filepath.Join(dir, "t.yaml"), []byte(leastModel+"data: {path: a.txt"+tc.yaml+"}\n"), o, fuzzDisk())
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Data.TokenCache(); got.Dir != tc.want || got.Least != tc.least || !got.Known {
			t.Errorf("%q, flag %q: %+v, want %s", tc.yaml, tc.flag, got, tc.want)
		}
	}
}
