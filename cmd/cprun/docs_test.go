package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// docs returns the text of the README and of the pages of docs and examples, by path.
func docs(t *testing.T) map[string]string {
	pages := map[string]string{}
	for _, glob := range []string{"README.md", "docs/*.md", "docs/*/*.md", "examples/*.md"} {
		files, _ := filepath.Glob("../../" + glob)
		for _, f := range files {
			if f != "../../docs/log.md" { // its commands may be old ones
				pages[strings.TrimPrefix(f, "../../")] = content(t, f)
			}
		}
	}
	return pages
}

var (
	codeBlock   = regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$")
	inlineCode  = regexp.MustCompile("`((?:bin/)?cprun [^`]+)`")
	shellWord   = regexp.MustCompile(`\$\(.*\)\S*|"[^"]*"|'[^']*'|[|;&<>()]+|[^\s"'|;&<>()]+`)
	namedFile   = regexp.MustCompile("(?ms)(?:^## |`)(\\w+\\.yaml)`?:?\n\n```yaml\n(.*?)^```$")
	toRun       = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$|`((?:bin/)?cprun plan [^`]* --assume [^`]*)`")
	placeholder = regexp.MustCompile(`^(\$\w|[A-Z])$`) // of a number
	fileOfTree  = regexp.MustCompile(`^(?:docs|examples|internal|scripts|attention)/\S+\.`)
)

// shellWords splits a line of shell into words, without its comment.
func shellWords(line string) (words []string) {
	line, _, _ = strings.Cut(strings.ReplaceAll(line, "RUN|HF-DIR", "RUN"), " #")
	for _, w := range shellWord.FindAllString(line, -1) {
		if w = strings.Trim(w, `"'`); w != "…" {
			words = append(words, placeholder.ReplaceAllString(w, "1"))
		}
	}
	return words
}

// parses fails unless cprun has the command, flags and keys of a line, and the tree its files. If the line is inline
// code, such as `cprun plan --json`, it may lack arguments.
func parses(t *testing.T, page, line string, inline bool) (found int) {
	t.Helper()
	words := shellWords(line)
	for _, w := range words {
		if files, err := filepath.Glob("../../" + w); fileOfTree.MatchString(w) && (err != nil || len(files) == 0) {
			t.Errorf("%s: %s: no file %s", page, line, w)
		}
	}
	at := slices.IndexFunc(words, func(w string) bool { return w == "cprun" || w == "bin/cprun" })
	if at < 0 || at > 0 && words[at-1] == "cd" {
		return 0
	}
	args := words[at+1:]
	if end := slices.IndexFunc(args, func(w string) bool { return strings.Trim(w, "|;&<>()") == "" }); end >= 0 {
		args = args[:end]
	}
	c, args, err := rootCommand().Find(args)
	if err == nil {
		err = c.ParseFlags(args)
	}
	if args = c.Flags().Args(); err == nil && (!inline || len(args) > 0) {
		err = c.ValidateArgs(args)
	}
	c.Flags().Visit(func(f *pflag.Flag) {
		fault := error(nil)
		if list, ok := f.Value.(pflag.SliceValue); ok && f.Name == "assume" {
			_, fault = machine.Assume(list.GetSlice())
		} else if ok && f.Name == "set" {
			for _, v := range list.GetSlice() {
				if key, _, _ := strings.Cut(v, "="); !config.IsSection(key) && config.UnknownKey(key) != "" {
					fault = errors.New(key + ": " + config.UnknownKey(key))
				}
			}
		}
		err = errors.Join(err, fault)
	})
	if err != nil {
		t.Errorf("%s: %s: %v", page, line, err)
	}
	return 1
}

// Every command of the pages, and every example of the help, is one of the program.
func TestCommandsOfTheDocs(t *testing.T) {
	t.Parallel()
	found := 0
	for page, text := range docs(t) {
		for _, m := range codeBlock.FindAllStringSubmatch(text, -1) {
			for line := range strings.SplitSeq(m[2], "\n") {
				if m[1] == "sh" || strings.HasPrefix(line, "$ ") {
					found += parses(t, page, line, false)
				} else if strings.HasPrefix(line, "cprun ") || strings.HasPrefix(line, "bin/cprun ") {
					t.Errorf("%s: %s: mark the block as sh", page, line)
				}
			}
		}
		for _, m := range inlineCode.FindAllStringSubmatch(codeBlock.ReplaceAllString(text, ""), -1) {
			found += parses(t, page, m[1], true)
		}
	}
	for left := []*cobra.Command{rootCommand()}; len(left) > 0; left = append(left[1:], left[0].Commands()...) {
		for line := range strings.Lines(left[0].Example) {
			found += parses(t, left[0].CommandPath()+" -h", strings.TrimSpace(line), false)
		}
	}
	if found < 100 {
		t.Errorf("only %d commands found", found)
	}
}

// elsewhere lists parts of the lines that TestPagesRun leaves out.
var elsewhere = []string{
	"docker", "git clone", "nvidia", "openssl", "scripts/peer", // what this machine may lack
	"pip install", "share/doc/cprun", "make run", "make test", "lengths.yaml  ", // .ci/run
	"make cuda", "examples/gpu/", "bin/cprun bench", // GPUs; bench_test.go has small sizes
	"sbatch", "srun", "kubectl", "ssh ", // make test-slurm, make test-cluster
	"examples/hf/run",        // TestExamplesContinueAtALongerContext
	"--longest", "long.yaml", // seconds; plan_longest_test.go, scale_test.go
}

// smaller replaces the sizes of the pages by those of a test.
var smaller = strings.NewReplacer("128K", "64", " 64K", " 64", "--nproc 4", "--nproc 2", "--nproc 8", "--nproc 2",
	"steps: 300", "steps: 1", "steps=5000", "steps=2", "steps: 400", "steps: 2", "warmup_steps: 20", "warmup_steps: 1",
	"every: 50, samples: 8", "every: 1, samples: 2", "--samples 8", "--samples 2", "opticks-book-3", "gettysburg",
	"--max-tokens 40", "--max-tokens 4")

// shell runs commands in a directory; bin/cprun is a program there, and $0 the test's.
func shell(t *testing.T, dir, script string) {
	c := process(t)
	c.Path, c.Args, c.Dir = "/bin/sh", []string{"sh", "-euxc", "PATH=$PWD/bin:$PATH\n" + script, c.Path}, dir
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// The commands of each page run, in their order, with small models and little data.
func TestPagesRun(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for name, model := range map[string]string{"Llama-3.2-1B": "families/llama-bias", "Qwen3-8B": "parity/tiny-qwen3-yarn",
		"Qwen3-30B-A3B": "families/qwen3_moe", "Qwen3.5-9B": "families/qwen3_5_text"} {
		if err := os.Rename(worded(t, "../../internal/model/testdata/"+model), filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	write(t, root, "train.yaml", content(t, small(t, 1)))
	write(t, root, "experiment.yaml", "{base: train.yaml, grid: {nproc: [1]}, warmup: 0}")
	shell(t, root, `tree=`+absolute(t, "")+`
mkdir bin texts chats
ln -s $0 bin/cprun
ln -s $tree/examples .
cp examples/data/gettysburg.txt texts
cp -r texts held-out
cp $tree/internal/text/data/testdata/chat/messages.parquet chats
cp $tree/internal/text/data/testdata/chat/messages.jsonl chats.jsonl
cprun --run-dir runs/opticks-20261120-101500 train.yaml
cp -r runs/opt* runs/a
cp -r runs/a runs/b
cprun scale --out runs/lengths-20261122-200000 experiment.yaml`)
	for page, text := range docs(t) {
		text = namedFile.ReplaceAllString(text, "\n```sh\ncat >$1 <<'EOF'\n${2}EOF\n```")
		script := ""
		for _, m := range toRun.FindAllStringSubmatch(text, -1) {
			for line := range strings.Lines(m[1] + m[2] + "\n") {
				if !slices.ContainsFunc(elsewhere, func(part string) bool { return strings.Contains(line, part) }) {
					script += smaller.Replace(line)
				}
			}
		}
		if strings.TrimSpace(script) == "" || strings.HasPrefix(page, "docs/benchmarks/") {
			continue
		}
		t.Run(page, func(t *testing.T) {
			t.Parallel()
			shell(t, t.TempDir(), "ln -s "+root+"/* .\n"+script)
		})
	}
}
