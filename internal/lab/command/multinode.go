package command

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/cluster"
	"github.com/cprun/cprun/internal/launch/place"
	"github.com/cprun/cprun/internal/launch/place/key"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/job"
)

// A multiNode runs this node's part of a run on several nodes. An agent is the launcher on one node. The leading agent
// creates the run directory and sends its path to the others. If it fails, another agent leads.
type multiNode struct {
	*TrainOptions
	ctx     context.Context
	path    string // of the config
	at      *place.Placement
	workers int // number of this agent's workers
	out     *progress.Printer
	track   *tracker

	firstDevice int        // the number of the first worker's GPU
	addr        netip.Addr // of this host, for the others
	meeting     string     // the rendezvous, as this host reaches it
	secret      []byte     // the key of the job

	last  job.Train // the task of the last start; the next has its RunDir, RunID and Generation
	lead  begun     // on the leader of the present start; else empty
	logs  *os.Root
	log   *launcherLog
	leads bool
}

// multiNode checks the input and gets the job's key.
func (o *TrainOptions) multiNode(
	ctx context.Context, path string, at *place.Placement, out *progress.Printer,
) (*multiNode, error) {
	workers, err := o.resolve()
	if err != nil {
		return nil, err
	}
	t := &multiNode{
		TrainOptions: o, ctx: ctx, path: path, at: at, workers: cmp.Or(at.Workers, workers), out: out,
		track: &tracker{out: out, start: time.Now(), measures: o.NoSave, advanced: o.advanced},
	}
	if err := t.check(); err != nil {
		return nil, err
	}
	if t.firstDevice, err = firstDevice(at, t.workers, o.machine.GPUs); err != nil {
		return nil, err
	}
	if err := t.chooseAddress(); err != nil {
		return nil, err
	}
	t.secret, err = t.key(ctx)
	return t, err
}

// nameTime bounds the wait until the name of the rendezvous has an address.
const nameTime = 30 * time.Second

// chooseAddress chooses this host's address. The first agent prints the choice.
func (t *multiNode) chooseAddress() error {
	ctx, cancel := context.WithTimeout(t.ctx, nameTime)
	defer cancel()
	s := surroundings{localAddresses(sysNet), lookup, routeTo}
	addr, line, err := s.choose(ctx, t.Interface, t.at)
	if err != nil {
		return err
	}
	t.addr, t.meeting = addr, s.meeting(ctx, addr, t.at.Rendezvous)
	if line != "" && t.at.Rank <= 0 && t.show() != launch.ShowNone {
		t.out.Note(line)
	}
	return nil
}

// check checks the input for the largest number of agents, then for the smallest.
func (t *multiNode) check() (err error) {
	o := *t.TrainOptions
	for _, agents := range []int{t.at.MaxAgents, t.at.MinAgents} {
		o.machine.Hosts = hosts(t.at, agents)
		if _, err = o.checkInput(t.ctx, t.path, agents*t.workers); err == nil {
			return nil
		}
	}
	return err
}

// hosts estimates the number of hosts before the agents meet.
func hosts(at *place.Placement, agents int) int {
	perHost := max(1, at.LocalAgents)
	return (agents + perHost - 1) / perHost
}

func (t *multiNode) train(signals *launch.Signals) (int, error) {
	defer t.close()
	membership, err := t.join()
	if err != nil {
		return 0, err
	}
	spec := launch.Job{
		NProc: t.workers, Device: t.firstDevice, Interface: interfaceOf(t.addr),
		Argv:   []string{"worker", string(job.RoleTrain)},
		Stderr: t.out, Show: t.show(), OnEvent: t.track.event, Node: t.at.Node, Patient: t.at.SlurmJob != "",
		Membership: &runMembership{membership, t}, Signals: signals,
	}
	live := startStatus(&spec, t.at.MaxAgents)
	res := launch.Run(t.ctx, spec)
	if input := (*InputError)(nil); errors.As(res.Err, &input) {
		res.ExitCode = launch.ExitInput
	}
	live.end(res)
	why := ""
	if res.Err != nil {
		why = res.Err.Error()
	}
	if err := membership.Close(res.ExitCode, why); err != nil {
		t.out.Note(err.Error())
	}
	t.out.Close()
	if t.leads {
		t.lead.merge(res)
		t.track.summary(res)
	}
	return res.ExitCode, t.log.end(res)
}

// firstDevice returns the number of this agent's first GPU among the visible ones. If the agents of a node see all of
// its GPUs, they share them out.
func firstDevice(at *place.Placement, workers, gpus int) (int, error) {
	if gpus <= workers || at.LocalAgents < 2 {
		return 0, nil // all visible GPUs are this agent's
	}
	if gpus < workers*at.LocalAgents {
		return 0, inputf("%d tasks on this node see %d GPUs and need %d; request more, such as srun "+
			"--gpus-per-task %d", at.LocalAgents, gpus, workers*at.LocalAgents, workers)
	}
	return workers * at.LocalRank, nil
}

func (t *multiNode) join() (*cluster.Membership, error) {
	inputs, err := t.inputs()
	if err != nil {
		return nil, err
	}
	id, err := hostID()
	if err != nil {
		return nil, err
	}
	c := cluster.Config{
		Job: t.at.Job, Key: t.secret, Program: t.Version, Inputs: inputs,
		NodeRank: t.at.Rank, Min: t.at.MinAgents, Max: t.at.MaxAgents, NProc: t.workers,
		Host: t.at.Node, HostID: id, Listen: t.addr.String(), Meets: t.at.Rank == 0, Seeds: []string{t.meeting},
		MaxRestarts: t.MaxRestarts, RunDir: t, Log: t.note,
	}
	if t.at.Rank <= 0 { // this may be the node of the rendezvous
		_, port, err := net.SplitHostPort(t.at.Rendezvous)
		if err != nil {
			return nil, inputf("--rendezvous %s: %w", terminal.Name(t.at.Rendezvous), err)
		}
		if c.Port, err = strconv.Atoi(port); err != nil {
			return nil, err
		}
	}
	return cluster.Join(t.ctx, c)
}

func (t *multiNode) note(format string, args ...any) { t.out.Note(fmt.Sprintf(format, args...)) }

// inputs returns a digest of the config and flags that must be equal on all agents.
func (t *multiNode) inputs() (string, error) {
	text, err := files.Read(t.path, config.MaxFile)
	if err != nil {
		return "", inputf("%w", err)
	}
	sum := sha256.Sum256(payload([]any{string(text), t.Set, t.RunDir, t.Resume, t.machine.Device()}))
	return hex.EncodeToString(sum[:]), nil
}

// hostID identifies this host. It includes NCCL's own identifier, since NCCL treats hosts that differ in it as
// different.
func hostID() (string, error) {
	boot, err := files.Read("/proc/sys/kernel/random/boot_id", 1<<10)
	if err != nil {
		return "", fmt.Errorf("identity of this host: %w", err)
	}
	network, err := os.Readlink("/proc/self/ns/net") // of a container
	if err != nil {
		return "", fmt.Errorf("identity of this host: %w", err)
	}
	id := strings.TrimSpace(string(boot)) + " " + network
	if named := launch.Getenv(launch.EnvHostID); named != "" {
		id += " " + named
	}
	return id, nil
}

// Prepare prepares the run directory for a start, and returns the payload of the workers.
func (t *multiNode) Prepare(ctx context.Context, w cluster.Assignment) ([]byte, error) {
	t.close()
	o := *t.TrainOptions
	ids := map[string]bool{}
	for _, a := range w.Members {
		ids[a.HostID] = true
	}
	o.machine.Hosts = len(ids)
	if t.last.RunDir != "" { // an earlier start created it
		o.RunDir, o.Resume = t.last.RunDir, "auto"
	}
	t.last.RunID = cmp.Or(t.last.RunID, launch.NewRunID(time.Now()))
	o.job = t.last.RunID
	r, err := o.check(ctx, t.path, w.Size)
	if err == nil {
		t.lead, err = o.begin(r, t.out)
	} else {
		t.lead.ready = r
	}
	if input := (*InputError)(nil); errors.As(err, &input) {
		return nil, &launch.Over{Result: launch.Result{ExitCode: launch.ExitInput}, Why: err.Error()}
	}
	if err != nil {
		return nil, err
	}
	t.last.Generation, t.last.RunDir = cmp.Or(t.last.Generation, r.generation), r.dir
	task := &t.lead.task
	task.RunID, task.Generation, task.World = t.last.RunID, t.last.Generation, int64(w.Generation)
	return payload(t.lead.task), nil
}

// Claim records a decision of the agents as a start of the run, whose task is in payload. A newer job ends this one.
func (*multiNode) Claim(ctx context.Context, payload []byte, number int, decision []byte) (newest []byte, err error) {
	var task job.Train
	if err := json.Unmarshal(payload, &task); err != nil {
		return nil, fmt.Errorf("task of the workers: %w", err)
	}
	dir, err := files.OpenDir(filepath.Join(task.RunDir, checkpointsName))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	newest, err = checkpoint.Claim(ctx, dir, checkpoint.Start{Job: task.RunID, First: task.Generation,
		Generation: task.Generation + int64(number)}, decision)
	if errors.Is(err, checkpoint.ErrSuperseded) {
		err = &launch.Over{Result: launch.Result{ExitCode: launch.ExitFailed}, Why: err.Error()}
	}
	return newest, err
}

// A runMembership is a membership whose starts have a run directory.
type runMembership struct {
	*cluster.Membership
	run *multiNode
}

func (m *runMembership) Next(ctx context.Context) (launch.Start, error) {
	s, err := m.Membership.Next(ctx)
	if err == nil {
		err = m.run.open(&s)
	}
	return s, err
}

// open opens the leader's run directory for this agent's workers.
func (t *multiNode) open(s *launch.Start) error {
	var task job.Train
	if err := json.Unmarshal(s.Payload, &task); err != nil {
		return fmt.Errorf("message of the leader: %w", err)
	}
	t.last, s.RunID = task, task.RunID
	t.leads = t.lead.root != nil && s.Ranks.FirstRank == 0
	if t.leads {
		s.Logs, t.log = t.lead.logs, t.lead.log
		t.track.root, t.track.again, t.track.writes = t.lead.root, t.again(task.RunDir), t.writes(task.RunDir, t.lead.cfg)
		return nil
	}
	t.close()
	root, err := t.shared(&task)
	if err != nil {
		return err
	}
	defer root.Close()
	if t.logs, err = files.Private(root, "logs"); err != nil {
		return fmt.Errorf("run directory: %w", err)
	}
	s.Logs = t.logs
	t.log, err = openLog(t.logs, fmt.Sprintf("launcher-%04d.log", s.Ranks.NodeRank), t.out, t.TrainOptions)
	return err
}

// Limits of the wait until a node sees the files of another: NFS caches a directory for up to a minute.
const (
	sharedTime = 90 * time.Second
	sharedPoll = 100 * time.Millisecond
)

// shared opens the run directory that the leader created, and checks that it is the same one.
func (t *multiNode) shared(task *job.Train) (*os.Root, error) {
	for end := time.Now().Add(sharedTime); ; {
		root, err := files.OpenDir(task.RunDir)
		if err == nil {
			var text []byte
			if text, err = files.ReadIn(root, "config.yaml", config.MaxFile); err == nil &&
				string(text) == task.Config {
				return root, nil
			}
			if err == nil {
				err = fmt.Errorf("%s differs from the leader's", terminal.Name(filepath.Join(task.RunDir, "config.yaml")))
			}
			root.Close()
		}
		if time.Now().After(end) || !files.Remote(task.RunDir) {
			return nil, inputf("this node does not see the run directory of rank 0: %w; name a --run-dir on a "+
				"file system that all nodes share", err)
		}
		select {
		case <-time.After(sharedPoll):
		case <-t.ctx.Done():
			return nil, context.Cause(t.ctx)
		}
	}
}

func (t *multiNode) close() {
	if t.lead.root != nil {
		t.lead.close()
	} else if t.log != nil {
		t.log.close()
	}
	t.lead.ready.close()
	if t.logs != nil {
		t.logs.Close()
	}
	t.lead, t.logs, t.log, t.leads = begun{}, nil, nil, false
}

// place returns this process's place in the job, from the flags and the launcher's environment variables.
func (o *Options) place() (place.Placement, error) {
	nproc, _ := strconv.Atoi(o.NProc) // resolve reports errors
	at, err := place.Find(launch.Getenv, place.Flags{
		NProc: max(0, nproc), Nodes: o.NNodes, NodeRank: o.NodeRank, Rendezvous: o.Rendezvous,
		Hostname: launch.Hostname(),
	})
	if err != nil {
		return at, &InputError{err}
	}
	if !at.Several() && at.Workers > 0 {
		o.NProc = strconv.Itoa(at.Workers)
	}
	if o.show() != launch.ShowNone {
		for _, note := range at.Notes {
			o.Printer().Note(note)
		}
	}
	return at, nil
}

// OneNode returns an error if a launcher started several tasks of a command that runs on one node.
func (o *Options) OneNode() error {
	at, err := o.place()
	if err != nil || !at.Several() {
		return err
	}
	return inputf("%[2]s started %[1]d tasks, and this command runs on one node; start it once, such as "+
		"srun --ntasks 1 or mpirun -n 1",
		at.MaxAgents, strings.ToLower(at.Source))
}

// UnderSlurm reports whether this is a job of Slurm, which sends SIGTERM more than once.
func UnderSlurm() bool { return launch.Getenv("SLURM_JOB_ID") != "" }

// keyTime bounds the wait for the key of another node.
const keyTime = 30 * time.Second

func (t *multiNode) key(ctx context.Context) ([]byte, error) {
	var k key.Key
	path, err := t.keyFile()
	if named := launch.Getenv(launch.EnvKeyFile); named != "" {
		k, err = key.File(named, os.Stdin)
	} else if err == nil {
		ctx, cancel := context.WithTimeout(ctx, keyTime)
		defer cancel()
		k, err = key.Shared(ctx, path)
	}
	if err != nil {
		return nil, &InputError{err}
	}
	return k[:], nil
}

// keyFile returns the path of the key: in the run directory, or without --run-dir in runs, with the job's name.
func (t *multiNode) keyFile() (string, error) {
	id := launch.Getenv("SLURM_JOB_ID")
	if id == "" && t.at.LocalAgents == t.at.MaxAgents { // agents of one host share its files
		id = fmt.Sprintf("%.8x", sha256.Sum256([]byte(t.at.Job)))
	}
	switch {
	case t.RunDir != "":
		return filepath.Abs(filepath.Join(t.RunDir, ".key"))
	case id != "":
		return filepath.Abs(filepath.Join("runs", ".job-"+id+".key"))
	}
	return "", errors.New("the nodes of a job need a key, which keeps other processes out; pass --run-dir with a " +
		"directory that all nodes share, or " + key.Fix)
}
