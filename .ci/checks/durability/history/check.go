package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// checkHistories records histories of one daemon and judges them.
func checkHistories(plan plan, seed uint64) error {
	return judgeHistories(plan, seed, lies, record, []string{"append acked", "append POSITION_MISMATCH", "append FENCED", "fence acked", "fence FENCED", "tail acked", "read acked"})
}

// judgeHistories records histories and judges each, first unchanged and then with a planted lie.
func judgeHistories(plan plan, seed uint64, lies []lie, record func(plan, int, *rand.Rand) (*recording, error), kinds []string) error {
	calls, undecided, judging := 0, 0, time.Duration(0)
	outcomes := map[string]int{}
	caught, planted := map[string]int{}, map[string]int{}
	for number := range plan.histories {
		random := rand.New(rand.NewPCG(seed, uint64(number)))
		recording, err := record(plan, number, random)
		if err != nil {
			check(false, "history %d: %v", number, err)
			continue
		}
		began := time.Now()
		verdict, why := judge(recording, recording.events, plan.limit)
		took := time.Since(began)
		judging += took
		calls += len(recording.events)
		for _, event := range recording.events {
			outcomes[outcome(event)]++
			if event.undecided {
				undecided++
			}
		}
		for name, count := range recording.pair.turned() {
			outcomes[name] += count
		}
		what := "durable"
		switch {
		case recording.early:
			what = "written"
		case recording.pair != nil:
			what = "replicated"
		}
		if recording.pair != nil {
			check(len(recording.trouble) == 0, "history %d: at the end the logs have the records as all answers said%s", number, some(recording.trouble))
		}
		check(verdict == porcupine.Ok, "history %d of %d calls, acked when %s, is linearizable: %s in %.2f s",
			number, len(recording.events), what, verdict, took.Seconds())
		if verdict != porcupine.Ok {
			if why != "" {
				fmt.Printf("  %s\n", why)
			} else {
				explain(recording.events, plan.limit)
			}
			continue
		}
		for _, lie := range lies {
			// At the beginning of the history: a judge that finds no order tries all orders.
			pause := random.IntN(2)
			if recording.pair != nil {
				// Lies that need a takeover have more places, and the judge is quick (thinned).
				pause = min(1, len(recording.pauses)-1)
			}
			changed, is := lie.plant(recording, recording.until(recording.pauses[pause]), random)
			if !is {
				continue
			}
			planted[lie.name]++
			began := time.Now()
			verdict, _ := judge(recording, changed, plan.limit)
			judging += time.Since(began)
			if verdict == porcupine.Illegal {
				caught[lie.name]++
			}
		}
	}
	for _, lie := range lies {
		// In every history that allows the lie: some lies need logs that ack early.
		check(planted[lie.name] >= max(plan.histories/5, 1) && caught[lie.name] == planted[lie.name],
			"%s: rejected in %d of %d histories", lie.name, caught[lie.name], planted[lie.name])
	}
	fmt.Printf("%d histories, %d calls, %d of them of unknown outcome; judged in %.1f s\n", plan.histories, calls, undecided, judging.Seconds())
	for _, name := range slices.Sorted(keys(outcomes)) {
		fmt.Printf("  %6d %s\n", outcomes[name], name)
	}
	for _, name := range kinds {
		check(outcomes[name] > 0, "there were calls of the kind: %s", name)
	}
	return nil
}

// judge returns whether a valid order exists, and the reason if a lagging answer breaks its rules.
func judge(recording *recording, events []event, limit time.Duration) (porcupine.CheckResult, string) {
	if recording.pair == nil {
		if why := lagBreaks(recording, events); why != "" {
			return porcupine.Illegal, why
		}
	} else if porcupine.CheckOperationsTimeout(model, operations(thinned(events)), limit) == porcupine.Illegal {
		return porcupine.Illegal, ""
	}
	return porcupine.CheckOperationsTimeout(model, operations(events), limit), ""
}

// until copies the history up to a pause; a call that is undecided by then continues after the pause.
func (r *recording) until(pause int64) []event {
	var made []event
	for _, event := range r.events {
		if event.from < pause {
			event.to = min(event.to, pause)
			made = append(made, event)
		}
	}
	return made
}

// some shows the first few of a list.
func some(trouble []string) string {
	if len(trouble) == 0 {
		return ""
	}
	return fmt.Sprintf(": %d, such as %s", len(trouble), strings.Join(trouble[:min(len(trouble), 3)], "; "))
}

func keys(counts map[string]int) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for name := range counts {
			if !yield(name) {
				return
			}
		}
	}
}

func outcome(event event) string {
	name := event.asked.kind.String()
	switch {
	case event.told.refusal != nil:
		return name + " " + event.told.refusal.reason
	case event.told.unknown:
		return name + " unknown"
	case event.weak && event.told.firsts != nil:
		return name + " that asked for less"
	case event.undecided:
		return name + " found, though its answer was lost"
	}
	return name + " acked"
}

// explain prints the point where the judge found no next call.
func explain(events []event, limit time.Duration) {
	history := operations(events)
	_, info := porcupine.CheckOperationsVerbose(model, history, limit)
	longest := []int{}
	for _, partial := range info.PartialLinearizations()[0] {
		if len(partial) > len(longest) {
			longest = partial
		}
	}
	is := map[int]bool{}
	for _, at := range longest {
		is[at] = true
	}
	now := model.Init()
	for _, at := range longest {
		_, now = model.Step(now, history[at].Input, history[at].Output)
	}
	fmt.Printf("  %d of %d calls have an order; then the logs are\n", len(longest), len(history))
	for i, log := range now.(state) {
		fmt.Printf("    log%d tail=%d epoch=%d\n", i, log.tail, log.epoch)
	}
	rest := []porcupine.Operation{}
	for at, operation := range history {
		if !is[at] {
			rest = append(rest, operation)
		}
	}
	slices.SortFunc(rest, func(a, b porcupine.Operation) int { return int(a.Return - b.Return) })
	for _, operation := range rest[:min(len(rest), 15)] {
		text := strings.ReplaceAll(describe(operation.Input.(input), operation.Output.(output)), "\n", " ")
		fmt.Printf("    [%d, %d] %s\n", operation.Call, operation.Return, text)
	}
}
