// SPDX-License-Identifier: Apache-2.0
// Leases: blocks that their owner keeps for a peer until that peer has pulled them, or is gone for a TTL. Owner and
// consumer both live here, so that neither a renewal nor an end waits for a loop.
//
// The consumer adopts a lease by name, once. From then on one message renews all that it adopted over the link, at a
// quarter of the shortest TTL; its cost does not grow with their number. A lease that has ended is over, and its owner
// told, only when no operation of the peer that began before can touch memory any more: a fence, or the peer's quiet.
#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace adt {
namespace {

constexpr uint8_t kIdle = 1;                   // flags of Say::release
constexpr size_t kMaxAdopted = 65536;          // over one link: all of them may be told to be over at once
constexpr uint32_t kLeaseFences = 64;          // at a time on one peer; what ends meanwhile shares the next
constexpr uint64_t kLeastRenewal = 1'000'000;  // the owner names the TTL, and the timer must rest

bool is_end(adt_status_t why) {
    return why == ADT_OK || why == ADT_ERR_TIMEOUT || why == ADT_ERR_PEER_LOST || why == ADT_ERR_CLOSED;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------ the owner

bool Engine::hold(const std::shared_ptr<Node> &node, uint64_t lease, uint64_t cache, const uint64_t *cluster,
                  uint64_t ttl_ns) {
    if (in_forked_child()) return false;
    auto made = std::make_unique<Lease>();
    made->id = lease;
    made->node = node;
    made->cache = cache;
    made->anyone = cluster == nullptr;
    made->cluster = cluster != nullptr ? *cluster : 0;
    made->ttl_ns = ttl_ns;
    const std::lock_guard<std::mutex> lock(mu_);
    made->renewed_ns = clock_.now_ns();
    if (node->closed || leases_.count(lease) != 0) return false;
    made->expiry = add_timer(due_ns(*made), TimerKind::lease, lease);
    leases_.emplace(lease, std::move(made));
    return true;
}

void Engine::end_lease(const std::shared_ptr<Node> &node, uint64_t lease) {
    if (in_forked_child()) return;
    Section s(*this);
    const auto found = leases_.find(lease);
    if (found != leases_.end() && found->second->node == node) end_lease(s, *found->second, ADT_OK);
}

void Engine::end_leases(const std::shared_ptr<Node> &node) {
    if (in_forked_child()) return;
    Section s(*this);
    end_leases(s, *node, 0);
}

std::vector<LeaseRow> Engine::leases(const std::shared_ptr<Node> &node, uint64_t only) {
    std::vector<LeaseRow> rows;
    if (in_forked_child()) return rows;
    const std::lock_guard<std::mutex> lock(mu_);
    const uint64_t now = clock_.now_ns();
    auto at = only != 0 ? leases_.find(only) : leases_.begin();
    for (; at != leases_.end(); ++at) {
        const Lease &lease = *at->second;
        if (lease.node == node) {
            const uint64_t due = due_ns(lease);
            rows.push_back(
                {lease.id, lease.ended, lease.adopter != nullptr, lease.ended || due <= now ? 0 : due - now});
        }
        if (only != 0) break;
    }
    return rows;
}

uint64_t Engine::due_ns(const Lease &lease) {
    const uint64_t renewed = lease.adopter ? std::max(lease.renewed_ns, lease.adopter->renewed_ns) : lease.renewed_ns;
    return renewed + lease.ttl_ns;
}

// The timer was set before the last renewal, as a rule: renewing one lease costs nothing here, and asking again does.
void Engine::expire_lease(Section &s, uint64_t id) {
    auto found = leases_.find(id);
    if (found == leases_.end()) return;
    found->second->expiry = timers_.end();
    if (const std::shared_ptr<Peer> adopter = found->second->adopter) {
        // This process may have been stopped itself: renewals of that time wait in the socket.
        if (due_ns(*found->second) <= clock_.now_ns()) read_wire(s, *adopter);
        found = leases_.find(id);
        if (found == leases_.end()) return;
    }
    Lease &lease = *found->second;
    if (lease.ended) return;
    const uint64_t due = due_ns(lease);
    if (due > clock_.now_ns()) {
        lease.expiry = add_timer(due, TimerKind::lease, id);
        return;
    }
    end_lease(s, lease, lease.lost ? ADT_ERR_PEER_LOST : ADT_ERR_TIMEOUT);
}

// `done`: a link on which nothing runs that could touch what the lease held.
void Engine::end_lease(Section &s, Lease &lease, adt_status_t why, const Peer *done) {
    if (lease.ended) return;
    lease.ended = true;
    lease.why = why;
    if (lease.expiry != timers_.end()) timers_.erase(lease.expiry);
    lease.expiry = timers_.end();
    if (const std::shared_ptr<Peer> adopter = std::exchange(lease.adopter, nullptr)) {
        adopter->leases.erase(lease.id);
        send(s, *adopter, {static_cast<uint8_t>(Say::lease_over), 0, 0, why, lease.id, 0, 0});
        s.defer([adopter] {});
    }
    std::vector<std::shared_ptr<Peer>> peers;
    for (const auto &[id, peer] : lease.node->peers) {
        if (peer.get() != done && (lease.anyone || peer->cluster == lease.cluster)) peers.push_back(peer);
    }
    const uint64_t id = lease.id;
    lease.fences = static_cast<uint32_t>(peers.size()) + 1;  // one for this function
    for (const std::shared_ptr<Peer> &peer : peers) {
        peer->leases_ended.push_back(id);
        fence_leases(s, *peer);
    }
    s.defer([peers = std::move(peers)] {});
    finish_lease(s, lease);
}

void Engine::end_leases(Section &s, const Node &node, uint64_t cache) {
    std::vector<Lease *> found;
    for (const auto &[id, lease] : leases_) {
        if (lease->node.get() == &node && (cache == 0 || lease->cache == cache)) found.push_back(lease.get());
    }
    // Each ends alone: the end of one erases no other.
    for (Lease *lease : found) end_lease(s, *lease, ADT_ERR_CLOSED);
}

void Engine::fence_leases(Section &s, Peer &peer) {
    if (peer.lease_fences == kLeaseFences || peer.leases_ended.empty()) return;
    ++peer.lease_fences;
    start_fence(s, peer, 0, nullptr, std::exchange(peer.leases_ended, {}));
}

void Engine::leases_fenced(Section &s, Peer &peer, const std::vector<uint64_t> &leases) {
    --peer.lease_fences;
    for (const uint64_t id : leases) {
        const auto found = leases_.find(id);
        if (found != leases_.end()) finish_lease(s, *found->second);
    }
    fence_leases(s, peer);
}

void Engine::finish_lease(Section &s, Lease &lease) {
    if (--lease.fences > 0) return;
    Event event;
    event.kind = EventKind::lease_over;
    event.status = lease.why;
    event.node = lease.node->id;
    event.token = lease.id;
    event.cache = lease.cache;
    emit(*lease.node, event);
    s.defer([node = std::move(lease.node)] {});
    leases_.erase(event.token);
}

// ------------------------------------------------------------------------------------------------------ both ends

bool Engine::handle_lease(Section &s, Peer &peer, const WireMessage &message) {
    if (peer.state != Peer::State::active) return true;
    const auto found = leases_.find(message.a);
    // Whose lease it is nobody learns who has no business with it.
    Lease *lease = found != leases_.end() && found->second->node == peer.node && !found->second->ended &&
                           (found->second->anyone || found->second->cluster == peer.cluster)
                       ? found->second.get()
                       : nullptr;
    Event event;
    event.node = peer.node->id;
    event.peer = peer.id;
    switch (static_cast<Say>(message.type)) {
        case Say::adopt: {
            if (lease != nullptr && peer.leases.size() >= kMaxAdopted) lease = nullptr;
            const adt_status_t status = lease != nullptr ? ADT_OK : ADT_ERR_NOT_FOUND;
            const uint64_t ttl = lease != nullptr ? lease->ttl_ns : 0;
            if (lease != nullptr) {
                if (lease->adopter) lease->adopter->leases.erase(lease->id);
                s.defer([old = std::exchange(lease->adopter, peers_.at(peer.id))] {});
                peer.leases.insert(lease->id);
                lease->anyone = false;
                lease->cluster = peer.cluster;
                lease->lost = false;
                lease->renewed_ns = clock_.now_ns();
            }
            send(s, peer, {static_cast<uint8_t>(Say::lease_answer), 0, 0, status, message.a, message.b, ttl});
            return true;
        }
        case Say::release: {
            const adt_status_t status = lease != nullptr ? ADT_OK : ADT_ERR_NOT_FOUND;
            send(s, peer, {static_cast<uint8_t>(Say::lease_answer), 0, 0, status, message.a, message.b, 0});
            if (lease == nullptr) return true;
            if (lease->adopter.get() == &peer) {
                peer.leases.erase(lease->id);
                lease->adopter.reset();  // `peer` outlives it
            }
            // An idle peer needs no fence, unless this side knows better.
            const bool quiet = (message.flags & kIdle) != 0 && peer.serving.empty();
            end_lease(s, *lease, ADT_OK, quiet ? &peer : nullptr);
            return true;
        }
        case Say::renew:
            peer.renewed_ns = clock_.now_ns();
            return true;
        case Say::lease_answer: {
            if (message.status != ADT_OK && message.status != ADT_ERR_NOT_FOUND) return false;
            const auto question = peer.lease_questions.find(message.b);
            if (question == peer.lease_questions.end()) return true;  // nobody waits for it
            const auto adopted = peer.adopted.find(message.a);
            event.status = message.status;
            if (question->second && adopted == peer.adopted.end())
                event.status = ADT_ERR_NOT_FOUND;  // let go meanwhile
            if (question->second && adopted != peer.adopted.end()) {
                if (message.status == ADT_OK) {
                    adopted->second = std::max(message.c, uint64_t{1});
                    schedule_renewal(peer, adopted->second);
                } else {
                    peer.adopted.erase(adopted);
                }
            }
            peer.lease_questions.erase(question);
            event.kind = EventKind::lease_answer;
            event.token = message.b;
            event.bytes = message.c;
            emit(*peer.node, event);
            return true;
        }
        case Say::lease_over:
            if (!is_end(message.status)) return false;
            if (peer.adopted.erase(message.a) == 0) return true;  // released meanwhile
            event.kind = EventKind::lease_lost;
            event.status = message.status;
            event.token = message.a;
            emit(*peer.node, event);
            return true;
        default:
            return false;
    }
}

// The link has ended, and with it what was adopted over it: the leases run out unless they are adopted again.
void Engine::leave_leases(Peer &peer) {
    for (const uint64_t id : peer.leases) {
        Lease &lease = *leases_.at(id);
        lease.renewed_ns = std::max(lease.renewed_ns, peer.renewed_ns);
        lease.lost = true;
        lease.adopter.reset();  // not the last reference: the caller has the peer
    }
    peer.leases.clear();
    peer.adopted.clear();
    peer.lease_questions.clear();
    if (std::exchange(peer.has_renewal, false)) timers_.erase(peer.renewal);
}

// --------------------------------------------------------------------------------------------------- the consumer

uint64_t Engine::ask_lease(Section &s, Peer &peer, Say what, uint8_t flags, uint64_t lease) {
    if (peer.state != Peer::State::active) return 0;
    const uint64_t token = next_id_++;
    peer.lease_questions.emplace(token, what == Say::adopt);
    send(s, peer, {static_cast<uint8_t>(what), flags, 0, 0, lease, token, 0});
    return token;
}

uint64_t Engine::adopt_lease(const std::shared_ptr<Peer> &peer, uint64_t lease) {
    if (in_forked_child()) return 0;
    Section s(*this);
    const uint64_t token = ask_lease(s, *peer, Say::adopt, 0, lease);
    if (token != 0) peer->adopted.emplace(lease, 0);
    return token;
}

uint64_t Engine::release_lease(const std::shared_ptr<Peer> &peer, uint64_t lease) {
    if (in_forked_child()) return 0;
    Section s(*this);
    peer->adopted.erase(lease);
    const bool idle = peer->ops.empty() && peer->inline_active == 0;
    return ask_lease(s, *peer, Say::release, idle ? kIdle : 0, lease);
}

void Engine::schedule_renewal(Peer &peer, uint64_t ttl_ns) {
    const uint64_t at = clock_.now_ns() + std::max(ttl_ns / 4, kLeastRenewal);
    if (peer.has_renewal) {
        if (peer.renewal->first <= at) return;
        timers_.erase(peer.renewal);
    }
    peer.renewal = add_timer(at, TimerKind::renew, peer.id);
    peer.has_renewal = true;
}

void Engine::renew_leases(Section &s, Peer &peer) {
    peer.has_renewal = false;
    uint64_t shortest = 0;
    for (const auto &[id, ttl] : peer.adopted) {
        if (ttl != 0) shortest = shortest == 0 ? ttl : std::min(shortest, ttl);
    }
    if (shortest == 0) return;
    send(s, peer, {static_cast<uint8_t>(Say::renew), 0, 0, 0, 0, 0, 0});
    schedule_renewal(peer, shortest);
}

}  // namespace adt
