package scale

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/lab/command"
	"github.com/cprun/cprun/internal/launch"
)

// maxTasks bounds the tasks of an array; each then runs several cells.
const maxTasks = 64

const sharesName = "array.json"

const maxShares = 16 << 20

type batch struct {
	Name, Dir, Command string
	Nodes, Last        int
}

var arrayScript = template.Must(template.New("array.sbatch").Parse(`#!/usr/bin/env bash
# Written by cprun scale: every task runs its share of the cells in array.json. Repeat the command of the experiment to
# submit the remaining cells.
#SBATCH --job-name={{.Name}}
#SBATCH --array=0-{{.Last}}
#SBATCH --nodes={{.Nodes}}
#SBATCH --ntasks-per-node=1
#SBATCH --output={{.Dir}}/slurm-%A_%a.out
#SBATCH --open-mode=append
exec {{.Command}} --share $((SLURM_ARRAY_TASK_ID + 1))
`))

var gatherScript = template.Must(template.New("gather.sbatch").Parse(`#!/usr/bin/env bash
# Written by cprun scale: gathers the results after the array.
#SBATCH --job-name={{.Name}}-results
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output={{.Dir}}/slurm-%j.out
exec {{.Command}} --gather
`))

func (s *scale) submit() (int, error) {
	left := s.order()
	if len(left) == 0 {
		return s.finish()
	}
	shares := make([][]string, min(maxTasks, len(left)))
	nodes := 1
	for k, c := range left { // in turn, so that every share has cells of each kind
		shares[k%len(shares)] = append(shares[k%len(shares)], c.ID)
		if n, ok := c.Number("nnodes"); ok {
			nodes = max(nodes, int(n))
		}
	}
	task, err := s.taskCommand()
	if err != nil {
		return launch.ExitFailed, err
	}
	b := batch{Name: jobName(s.e.Name), Dir: s.store.Dir(), Command: task, Nodes: nodes, Last: len(shares) - 1}
	if strings.ContainsAny(b.Dir, "\n\r %") {
		return 0, inputf("--out: %s contains a space, a %% or a line break, which batch scripts cannot name; name "+
			"another directory", terminal.Name(b.Dir))
	}
	root := s.store.Root
	err = files.Write(root, sharesName, func(w io.Writer) error { return json.NewEncoder(w).Encode(shares) })
	for _, t := range []*template.Template{arrayScript, gatherScript} {
		err = errors.Join(err, files.Write(root, t.Name(), func(w io.Writer) error { return t.Execute(w, b) }))
	}
	if err != nil {
		return launch.ExitFailed, err
	}
	if _, err := exec.LookPath("sbatch"); err != nil {
		return 0, inputf("--slurm: this host has no sbatch; submit %s on a host with it, and %s after the array has ended",
			terminal.Name(filepath.Join(b.Dir, arrayScript.Name())), terminal.Name(gatherScript.Name()))
	}
	array, err := s.sbatch(arrayScript.Name(), s.Sbatch...)
	if err != nil {
		return launch.ExitFailed, err
	}
	if err := files.WriteData(root, arrayName, []byte(array+"\n")); err != nil {
		return launch.ExitFailed, err
	}
	s.store.Close() // the tasks lock the directory
	gather, err := s.sbatch(gatherScript.Name(), append(queueOf(s.Sbatch), "--dependency=afterany:"+array)...)
	if err != nil {
		return launch.ExitFailed, fmt.Errorf("%w; job %s runs the cells; after it, gather the results with %s "+
			"--gather", err, array, task)
	}
	if !s.Quiet {
		fmt.Fprintf(s.Stdout, "submitted job %s (%d tasks for %d cells) and job %s (gathers the results in %s)\n",
			array, len(shares), len(left), gather, terminal.Name(b.Dir))
	}
	return launch.ExitDone, nil
}

const arrayName = "array.job"

// queued returns the last array of the directory if Slurm still has it, else "".
func (s *scale) queued() string {
	text, err := files.Read(filepath.Join(s.Out, arrayName), maxReason)
	job := strings.TrimSpace(string(text))
	if _, bad := strconv.ParseUint(job, 10, 64); err != nil || bad != nil {
		return ""
	}
	// squeue fails for a job that Slurm has forgotten.
	if out, err := exec.Command("squeue", "--noheader", "--jobs="+job, "--format=%i").Output(); err != nil ||
		len(bytes.TrimSpace(out)) == 0 {
		return ""
	}
	return job
}

// queueOf returns the arguments of the array that also apply to a job of one task.
func queueOf(args []string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(a string) bool {
		name, _, _ := strings.Cut(a, "=")
		return !slices.Contains([]string{"--partition", "--account", "--qos", "--time", "--mem", "-p", "-A", "-q",
			"-t"}, name)
	})
}

func (s *scale) sbatch(script string, args ...string) (string, error) {
	c := exec.Command("sbatch", append(append([]string{"--parsable"}, args...), filepath.Join(s.Out, script))...)
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("sbatch %s: %w: %s", terminal.Name(script), err,
			terminal.Clip(terminal.Text(strings.TrimSpace(errs.String())), maxReason))
	}
	job, _, _ := strings.Cut(strings.TrimSpace(string(out)), ";")
	if _, err := strconv.ParseUint(job, 10, 64); err != nil {
		return "", fmt.Errorf("sbatch %s: %q is not a job number", terminal.Name(script),
			terminal.Clip(string(out), 100))
	}
	return job, nil
}

// taskCommand returns this command for a task on any node that shares the file system.
func (s *scale) taskCommand() (string, error) {
	program, err := os.Executable()
	if err != nil {
		return "", err
	}
	path, err := filepath.Abs(s.e.Path)
	if err != nil {
		return "", err
	}
	work, err := os.Getwd()
	if err != nil {
		return "", err
	}
	args := []string{program, "scale", path, "--out", s.store.Dir(), "--nproc", s.NProc, "--device", s.Device}
	for _, set := range s.Set {
		args = append(args, "--set", set)
	}
	return "env --chdir=" + command.Shell([]string{work}) + " " + command.Shell(args), nil
}

var notInName = regexp.MustCompile(`[^A-Za-z0-9._-]`)

func jobName(name string) string { return notInName.ReplaceAllString(name, "_") }

func (s *scale) deal() error {
	text, err := files.Read(filepath.Join(s.Out, sharesName), maxShares)
	if err != nil {
		return inputf("--share: %w; cprun scale --slurm writes it", err)
	}
	var shares [][]string
	if err := json.Unmarshal(text, &shares); err != nil {
		return inputf("--share: %s: %w", sharesName, err)
	}
	if s.Share > len(shares) {
		return inputf("--share %d: %s has %d shares", s.Share, sharesName, len(shares))
	}
	s.share = map[string]bool{}
	for _, id := range shares[s.Share-1] {
		s.share[id] = true
	}
	return nil
}

func (s *scale) mine(c *cell) bool { return s.share == nil || s.share[c.ID] }
