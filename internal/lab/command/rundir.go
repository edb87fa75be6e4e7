package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
)

// prepare writes the plan and the config into the run directory. If an earlier start had another config, prepare keeps
// that and returns the changes.
func prepare(r *ready, machine machine.Machine, costs plan.Costs) (changes []string, err error) {
	dir, cfg := r.root, r.cfg
	opts := plan.Options{Machine: machine, Choice: r.choice.Choice, Costs: costs, Chosen: r.chosen, Data: r.data}
	if opts.Docs, err = firstDocuments(r.docs, cfg); err != nil {
		return nil, &InputError{err}
	}
	p, err := plan.Make(cfg, r.ranks, opts)
	if err != nil {
		return nil, &InputError{err}
	}
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	if changes, err = keepConfig(dir, cfg); err != nil {
		return nil, inputf("run directory: %w", err)
	}
	for name, data := range map[string][]byte{"config.yaml": cfg.YAML(), "plan.json": append(text, '\n')} {
		if err := replace(dir, name, data); err != nil {
			return nil, inputf("run directory: %w", err)
		}
	}
	return changes, nil
}

// firstDocuments returns the documents of the first sample: the known ones, or else from the data.
func firstDocuments(known []int, cfg *config.Config) ([]int, error) {
	if len(known) > 0 {
		return known, nil
	}
	return train.FirstDocuments(cfg)
}

// keepConfig renames the config of an earlier start to config-1.yaml and so on if this one differs, and lists the
// differences.
func keepConfig(dir *os.Root, cfg *config.Config) (changes []string, err error) {
	text, err := files.ReadIn(dir, "config.yaml", config.MaxFile)
	if errors.Is(err, fs.ErrNotExist) || err == nil && bytes.Equal(text, cfg.YAML()) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	kept := ""
	// a network file system may report late that a name exists
	for i, err := 1, fs.ErrExist; errors.Is(err, fs.ErrExist); i++ {
		kept = fmt.Sprintf("config-%d.yaml", i)
		if err = files.Exclusive(dir, kept, text); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	was, err := config.Parse(filepath.Join(dir.Name(), kept), text, config.Options{NoFiles: true})
	if err != nil { // another version of cprun wrote it, or an editor
		return []string{fmt.Sprintf("the last start's config, now %s, cannot be compared: %v", kept, err)}, nil
	}
	for _, d := range cfg.Differences(was) {
		changes = append(changes, fmt.Sprintf("  %s: %s -> %s", d.Key, d.Old, d.New))
	}
	return append([]string{"changed since the last start (its config is now " + kept + "):"}, changes...), nil
}

func replace(dir *os.Root, name string, data []byte) error {
	if old, err := files.ReadIn(dir, name, int64(len(data))); err == nil && bytes.Equal(old, data) {
		return nil
	}
	return files.WriteData(dir, name, data)
}

// A launcherLog is logs/launcher.log, the output of the launcher in every start.
type launcherLog struct {
	f      *os.File
	name   string
	out    *progress.Printer
	failed bool // the job: the last lines on the terminal are about its first failed rank
}

func openLog(logs *os.Root, name string, out *progress.Printer, o *TrainOptions) (*launcherLog, error) {
	f, err := files.Append(logs, name)
	if err != nil {
		return nil, inputf("run directory: %w", err)
	}
	fmt.Fprintf(f, "--- %s cprun %s: %s\n", time.Now().UTC().Format(progress.Stamp), o.Version,
		terminal.Name(Shell(o.Args)))
	out.Log(f)
	return &launcherLog{f: f, name: name, out: out}, nil
}

// note copies an error into the log. A nil log ignores it.
func (l *launcherLog) note(err error) error {
	if err != nil && l != nil {
		fmt.Fprintf(l.f, "%s cprun: %s\n", time.Now().UTC().Format(progress.Stamp), terminal.Message(err))
	}
	return err
}

// end copies the error of a job into the log.
func (l *launcherLog) end(res launch.Result) error {
	if l != nil {
		l.failed = res.ExitCode == launch.ExitFailed
	}
	return l.note(res.Err)
}

// close ends the log, and reports if it is incomplete.
func (l *launcherLog) close() {
	if err := errors.Join(l.out.LogErr(), l.f.Close()); err != nil && !l.failed {
		l.out.Note("logs/" + l.name + " is incomplete: " + err.Error())
	}
}

func (o *TrainOptions) again(dir string) string {
	args := Resuming(o.Args)
	if o.RunDir == "" && len(args) > 0 {
		args = slices.Insert(args, 1, "--run-dir", dir)
	}
	return Shell(args)
}

// writes returns the command that generates text with a run's model; "" if the tokenizer is unknown.
func (o *TrainOptions) writes(dir string, cfg *config.Config) string {
	if len(o.Args) == 0 || tokenizerOf(cfg) == "" {
		return ""
	}
	by := []string{"--prompt", "The"}
	if slices.ContainsFunc(cfg.Data.Path, func(f config.File) bool { return f.Kind == data.FormatMessages }) {
		by = []string{"--chat", "Hello"}
	}
	return Shell(append([]string{o.Args[0], "generate", dir}, by...))
}

// Resuming drops --resume never from a command line, so that it continues from the checkpoints.
func Resuming(args []string) []string {
	args = slices.Clone(args)
	for i := 1; i < len(args); i++ {
		switch {
		case args[i] == "--resume=never":
			args = slices.Delete(args, i, i+1)
			i--
		case args[i] == "--resume" && i+1 < len(args) && args[i+1] == "never":
			args = slices.Delete(args, i, i+2)
			i--
		}
	}
	return args
}

// plain lists the characters that need no quotes in a shell.
const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%+,-./:=@_"

// Shell returns a command line for a shell. Characters that a terminal must not print become $'\012', which bash, zsh
// and ksh read.
func Shell(args []string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		switch {
		case terminal.Line(a) != a:
			var b strings.Builder
			for _, c := range []byte(a) {
				if c < ' ' || c >= 0x7f || c == '\'' || c == '\\' {
					fmt.Fprintf(&b, `\%03o`, c)
				} else {
					b.WriteByte(c)
				}
			}
			a = "$'" + b.String() + "'"
		case a == "" || strings.Trim(a, plain) != "":
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		quoted[i] = a
	}
	return strings.Join(quoted, " ")
}
